"""Built things that can attempt and commit a step."""
