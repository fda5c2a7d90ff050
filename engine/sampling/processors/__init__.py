"""One file per sampling parameter, or family of them, that edits or truncates logits. All are found."""
