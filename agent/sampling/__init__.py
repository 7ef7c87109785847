"""Maps found, read and judged on a clock: from files in folders to frozen samples."""
