"""What fits multipack into frameworks. Each module imports its framework, and nothing else of multipack
imports them."""
