"""Our paged pool: blocks, references, the prefix cache, and the policies that say where the next block comes from."""
