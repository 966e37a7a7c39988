// Coder, for Python: the codecs of one shape of layers. Checks what it is given, and lets other threads run meanwhile.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "bytes.hpp"
#include "codecs.hpp"
#include "modules.hpp"

namespace nb = nanobind;

namespace kvc {
namespace {

// coding, dtype, channels, bytes of a layer raw and coded
using PlaneArguments = std::tuple<std::string, std::string, std::size_t, std::size_t, std::size_t>;

template <typename Value>
Value named(const std::string& name, std::initializer_list<std::pair<const char*, Value>> known) {
    for (const auto& [each, value] : known)
        if (name == each) return value;
    throw std::invalid_argument("there is no '" + name + "' here");
}

PlaneShape plane_of(std::size_t tokens, std::size_t heads, const PlaneArguments& arguments) {
    const auto& [coding, number, dim, raw_bytes, coded_bytes] = arguments;
    PlaneShape plane{};
    plane.tokens = tokens;
    plane.heads = heads;
    plane.coding = named<Coding>(coding, {{"raw", Coding::kRaw},
                                          {"rows", Coding::kRows},
                                          {"channels", Coding::kChannels},
                                          {"groups", Coding::kGroups}});
    plane.raw_bytes = raw_bytes;
    plane.coded_bytes = coded_bytes;
    if (plane.coding == Coding::kRaw) {
        if (raw_bytes != coded_bytes) throw std::invalid_argument("raw bytes stay as many as they are");
        return plane;
    }
    plane.number = named<Number>(number, {{"bfloat16", Number::kBfloat16},
                                          {"float16", Number::kFloat16},
                                          {"float32", Number::kFloat32}});
    plane.dim = dim;
    const std::size_t rows = tokens * heads, wide = plane.number == Number::kFloat32 ? 4 : 2;
    const std::size_t expected = plane.coding == Coding::kRows       ? rows * (4 + dim)
                                 : plane.coding == Coding::kChannels ? 2 * heads * dim + rows * dim / 2
                                                                     : rows * (2 * ((dim + 31) / 32) + dim / 2);
    if (!dim || dim % 8 || raw_bytes != rows * dim * wide || coded_bytes != expected)
        throw std::invalid_argument("a plane of other sizes than its shape has");
    return plane;
}

class Coder {
  public:
    Coder(std::size_t tokens, std::size_t heads, const std::vector<PlaneArguments>& planes) {
        if (!tokens || !heads || planes.empty()) throw std::invalid_argument("a layer without numbers");
        for (const PlaneArguments& arguments : planes) layer_.add(plane_of(tokens, heads, arguments));
    }

    bool encode(nb::handle data, nb::handle into, std::size_t layers) const {
        const Codecs& codecs = *kernels().codecs;
        return each_layer(data, layer_.raw_bytes, into, layer_.coded_bytes, layers,
                          [&](const auto* raw, auto* coded, float* scratch) {
                              return encode_layer(codecs, layer_, raw, coded, scratch);
                          });
    }

    void decode(nb::handle data, nb::handle into, std::size_t layers) const {
        const Codecs& codecs = *kernels().codecs;
        each_layer(data, layer_.coded_bytes, into, layer_.raw_bytes, layers,
                   [&](const auto* coded, auto* raw, float* scratch) {
                       decode_layer(codecs, layer_, coded, raw, scratch);
                       return true;
                   });
    }

    const LayerShape& shape() const { return layer_; }

    // The norm of what was lost by that of what there was, of the plane that has lost most.
    double error(nb::handle data, nb::handle coded, std::size_t layers) const {
        const Bytes raw(data, false), from(coded, false);
        check(raw, layer_.raw_bytes, from, layer_.coded_bytes, layers);
        const Codecs& codecs = *kernels().codecs;
        nb::gil_scoped_release others_run;
        std::vector<float> scratch(layer_.scratch);
        std::vector<std::uint8_t> decoded(layer_.raw_bytes);
        std::vector<Squares> planes(layer_.planes.size());
        for (std::size_t i = 0; i < layers; i++) {
            decode_layer(codecs, layer_, from.data() + i * layer_.coded_bytes, decoded.data(), scratch.data());
            add_squares(codecs, layer_, raw.data() + i * layer_.raw_bytes, decoded.data(), planes.data());
        }
        double worst = 0;
        for (const Squares& plane : planes)
            if (plane.whole > 0) worst = std::max(worst, std::sqrt(plane.lost / plane.whole));
        return worst;
    }

  private:
    static void check(const Bytes& from, std::size_t from_bytes, const Bytes& to, std::size_t to_bytes,
                      std::size_t layers) {
        if (!layers || from.size() != layers * from_bytes || to.size() != layers * to_bytes)
            throw std::invalid_argument("these bytes are not so many layers of this shape");
    }

    // Until `work` answers false.
    template <typename Work>
    bool each_layer(nb::handle data, std::size_t from_bytes, nb::handle into, std::size_t into_bytes,
                    std::size_t layers, const Work& work) const {
        const Bytes from(data, false), to(into, true);
        check(from, from_bytes, to, into_bytes, layers);
        nb::gil_scoped_release others_run;
        std::vector<float> scratch(layer_.scratch);
        for (std::size_t i = 0; i < layers; i++)
            if (!work(from.data() + i * from_bytes, to.data() + i * into_bytes, scratch.data())) return false;
        return true;
    }

    LayerShape layer_;
};

}  // namespace

const LayerShape& shape_of(nb::handle coder) { return nb::cast<const Coder&>(coder).shape(); }

void bind_codecs(nb::module_& m) {
    nb::class_<Coder>(m, "Coder")
        .def(nb::init<std::size_t, std::size_t, const std::vector<PlaneArguments>&>(), nb::arg("tokens"),
             nb::arg("heads"), nb::arg("planes"))
        .def("encode", &Coder::encode, nb::arg("data"), nb::arg("into"), nb::arg("layers"))
        .def("error", &Coder::error, nb::arg("data"), nb::arg("coded"), nb::arg("layers"))
        .def("decode", &Coder::decode, nb::arg("data"), nb::arg("into"), nb::arg("layers"));
}

}  // namespace kvc
