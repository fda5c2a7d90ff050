"""All cells of workload, sampling and requests at once: does a drafter gain there, and does ``auto``?"""
