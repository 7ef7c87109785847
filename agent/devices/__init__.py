"""What the memory of this machine's devices holds, and who holds it. Everything here is optional."""
