// What the parts of the extension module share.
#pragma once

#include <nanobind/nanobind.h>

#include "codecs.hpp"
#include "kernels.hpp"

namespace kvc {

const Kernels& kernels();                            // those in use
const LayerShape& shape_of(nanobind::handle coder);  // of a Coder
void bind_arrays(nanobind::module_& m);
void bind_codecs(nanobind::module_& m);
void bind_attention(nanobind::module_& m);
void bind_copies(nanobind::module_& m);

}  // namespace kvc
