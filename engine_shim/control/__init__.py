"""The control socket: typed, bounded messages, handed to the engine's own thread at a step boundary."""
