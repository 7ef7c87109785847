"""The parts of the page, each fetching what it shows and drawing it."""
