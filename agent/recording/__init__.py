"""Recordings of an engine's allocation map: every event and sample of it in one file, and that file played back."""
