// kvcluster.memory._native: the kernels, for Python. Checks what it is given, and lets other threads run meanwhile.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <stdexcept>
#include <vector>

#include "bytes.hpp"
#include "kernels.hpp"
#include "modules.hpp"

namespace nb = nanobind;

namespace {

using kvc::Bytes;
using kvc::Kernels;

// To let others run and to come back takes about as long as hashing this much.
constexpr std::size_t kWorthwhileBytes = 8 * 1024;

const std::vector<const Kernels*> kHere = kvc::kernels_here();
const Kernels* chosen = kHere.back();

}  // namespace

const kvc::Kernels& kvc::kernels() { return *chosen; }

namespace {

using kvc::kernels;

kvc::Layers layers_of(const Bytes& data, std::size_t layers, std::uint64_t seed, std::uint64_t step) {
    if (!layers || data.size() % layers || data.size() / layers < kvc::kLeastLayerBytes)
        throw std::invalid_argument("these bytes are not so many layers of more than 240 bytes");
    return {layers, data.size() / layers, seed, step};
}

template <typename Work>
nb::object sums_by(std::size_t nbytes, std::size_t layers, const Work& work) {
    std::vector<std::uint64_t> sums(layers);
    if (nbytes < kWorthwhileBytes) {
        work(sums.data());
    } else {
        nb::gil_scoped_release others_run;
        work(sums.data());
    }
    nb::object result = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(layers)));
    if (!result) nb::raise_python_error();
    for (std::size_t i = 0; i < layers; i++) {
        PyObject* number = PyLong_FromUnsignedLongLong(sums[i]);
        if (!number) nb::raise_python_error();
        PyTuple_SET_ITEM(result.ptr(), static_cast<Py_ssize_t>(i), number);
    }
    return result;
}

nb::object sums(nb::handle data, std::size_t layers, std::uint64_t seed, std::uint64_t step) {
    const Bytes bytes(data, false);
    const kvc::Layers of = layers_of(bytes, layers, seed, step);
    const Kernels& here = kernels();
    return sums_by(bytes.size(), layers, [&](std::uint64_t* out) { here.sums(bytes.data(), of, out); });
}

nb::object copy_sums(nb::handle into, nb::handle data, std::size_t layers, std::uint64_t seed, std::uint64_t step) {
    const Bytes bytes(data, false), place(into, true);
    const kvc::Layers of = layers_of(bytes, layers, seed, step);
    if (place.size() != bytes.size()) throw std::invalid_argument("there is not as much room as there are bytes");
    const std::less<const std::uint8_t*> before;
    if (before(place.data(), bytes.data() + bytes.size()) && before(bytes.data(), place.data() + place.size()))
        throw std::invalid_argument("the bytes would be copied onto themselves");
    const Kernels& here = kernels();
    return sums_by(bytes.size(), layers,
                   [&](std::uint64_t* out) { here.copy_sums(place.data(), bytes.data(), of, out); });
}

void choose(const char* name) {
    const auto named = [&](const Kernels* each) { return !std::strcmp(each->name, name); };
    const auto found = std::find_if(kHere.begin(), kHere.end(), named);
    if (found == kHere.end()) throw std::invalid_argument("this machine has no such kernels");
    chosen = *found;
}

}  // namespace

NB_MODULE(_native, m) {
    // A process may end while objects of ours are in use, by a client that it left open: that is no leak to report.
    nb::set_leak_warnings(false);
    m.def("sums", &sums, nb::arg("data"), nb::arg("layers"), nb::arg("seed"), nb::arg("step"));
    m.def("copy_sums", &copy_sums, nb::arg("into"), nb::arg("data"), nb::arg("layers"), nb::arg("seed"), nb::arg("step"));
    m.def("choose", &choose, nb::arg("name"));
    m.def("chosen", [] { return kernels().name; });
    kvc::bind_arrays(m);
    kvc::bind_attention(m);
    kvc::bind_codecs(m);
    kvc::bind_copies(m);
    m.def("names", [] {
        nb::list all;
        for (const Kernels* each : kHere) all.append(each->name);
        return all;
    });
}
