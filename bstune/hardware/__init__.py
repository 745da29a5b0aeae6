"""What the hardware allows: memory ceiling, step time, roofline and scale-out."""
