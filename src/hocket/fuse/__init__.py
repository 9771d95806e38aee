"""Many small models trained as one."""
