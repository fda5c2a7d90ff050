"""APIs that are told in terms of the common requests and replies: a folder each. Its files that have a
``router`` are part of the application."""
