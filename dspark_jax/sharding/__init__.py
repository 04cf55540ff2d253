"""Meshes: which axes of the caller's mesh split requests and vocabulary, and how a program runs over them."""
