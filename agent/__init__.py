"""The sidecar: finds maps, samples and analyses them, and serves what it saw over HTTP."""
