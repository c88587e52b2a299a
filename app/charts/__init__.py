"""The live charts of the dashboard: where the memory goes, who owns which KV block, how fast tokens come."""
