"""The proofs, from the pure protocol to real workers under fire."""
