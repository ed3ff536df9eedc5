"""Which rows come when and where: packing, plans, dealing to ranks."""
