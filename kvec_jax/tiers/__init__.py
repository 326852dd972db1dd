"""KVDrive: the cache spread over device memory, host memory and disk; a step fetches only what it needs."""
