"""Decoding: prompts in, tokens out; one jitted round of drafting and verification at a time."""
