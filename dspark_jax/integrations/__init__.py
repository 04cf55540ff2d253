"""For servers: exported programs, batch buckets, counters, and adapters to JAX serving stacks (docs/servers.md)."""
