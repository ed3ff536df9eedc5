// The only file that knows nanobind: it checks shapes and dtypes, releases the GIL and calls plain C++.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "gather.h"
#include "packing.h"

namespace nb = nanobind;

NB_MODULE(_core, module) { module.doc() = "Compiled kernels of multipack."; }
