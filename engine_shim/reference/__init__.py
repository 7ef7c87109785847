"""Our own paged-KV engine on torch: real KV memory, real block tables, a trace in real or scaled time."""
