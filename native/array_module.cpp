// Arrays of other libraries, for Python: where the elements of one lie that is exported by DLPack.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <stdexcept>

#include "modules.hpp"

namespace nb = nanobind;

namespace {

template <typename Array>
nb::tuple described(const Array& array, bool readonly) {
    nb::list shape, strides;
    for (std::size_t i = 0; i < array.ndim(); i++) {
        shape.append(array.shape(i));
        strides.append(array.stride(i));
    }
    const nb::dlpack::dtype type = array.dtype();
    return nb::make_tuple(reinterpret_cast<std::uintptr_t>(array.data()), nb::tuple(shape), nb::tuple(strides),
                          static_cast<int>(type.code), static_cast<int>(type.bits), static_cast<int>(type.lanes),
                          readonly, nb::cast(array, nb::rv_policy::reference));
}

nb::tuple dlpack_view(nb::handle capsule) {
    if (!PyCapsule_CheckExact(capsule.ptr())) throw std::invalid_argument("this is no capsule of DLPack");
    nb::ndarray<> writable;
    if (nb::try_cast(capsule, writable, false)) return described(writable, false);
    nb::ndarray<nb::ro> readonly;
    if (nb::try_cast(capsule, readonly, false)) return described(readonly, true);
    throw std::invalid_argument("this is no capsule of DLPack, or one that was used");
}

}  // namespace

void kvc::bind_arrays(nb::module_& m) { m.def("dlpack_view", &dlpack_view, nb::arg("capsule")); }
