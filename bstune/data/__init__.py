"""Data sets with pinned checksums, and batches that live on the device."""
