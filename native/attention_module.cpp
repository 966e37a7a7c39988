// attend and merge_results, for Python. Checks what it is given, and lets other threads run meanwhile.
//
// Tensors come as addresses: kvcluster/attention/native_kernel.py checks their shapes and keeps them alive.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include "attention.hpp"
#include "modules.hpp"

namespace nb = nanobind;

namespace kvc {
namespace {

using Address = std::uintptr_t;
// addresses, codecs, pages, position, tokens
using SpanArguments = std::tuple<Address, Address, std::size_t, std::int64_t, std::int64_t>;
// number, block tokens, heads of a page, dims of key and value
using ShapeArguments = std::tuple<int, std::size_t, std::size_t, std::size_t, std::size_t>;
using CoderArguments = std::tuple<int, nb::object, std::size_t>;  // codec, coder, offset of the layer in a page
using SubtreeArguments = std::pair<std::size_t, std::size_t>;  // level, index
using ScoringArguments = std::tuple<float, float, float, std::int64_t, bool>;  // scale, cap, 1 / cap, window, causal

template <typename Value>
Value* at(Address address) {
    return reinterpret_cast<Value*>(address);
}

void expect(bool holds, const char* what) {
    if (!holds) throw std::invalid_argument(what);
}

void take_shape(AttentionCall& call, const ShapeArguments& shape, const std::vector<CoderArguments>& coders,
                std::pair<std::size_t, std::size_t> heads) {
    const auto [number, block_tokens, page_heads, key_dim, value_dim] = shape;
    expect(number >= 0 && number < 3 && block_tokens && page_heads && key_dim && value_dim, "an empty page");
    call.number = static_cast<Number>(number);
    call.block_tokens = block_tokens;
    call.page_heads = page_heads;
    call.key_dim = key_dim;
    call.value_dim = value_dim;
    call.head_start = heads.first;
    call.head_stop = heads.second;
    expect(heads.first < heads.second && heads.second <= page_heads, "heads that a page does not have");
    expect(call.query_heads && call.query_heads % (heads.second - heads.first) == 0, "query heads that make no groups");
    const std::size_t row = block_tokens * page_heads * (call.number == Number::kFloat32 ? 4 : 2);
    for (const auto& [codec, coder, offset] : coders) {
        const LayerShape& layer = shape_of(coder);
        const bool latent = layer.planes.size() == 1;
        expect(latent || layer.planes.size() == 2, "a layer of other planes");
        expect(layer.planes.front().raw_bytes == row * key_dim, "a plane of keys of another size");
        expect(latent ? value_dim <= key_dim : layer.planes.back().raw_bytes == row * value_dim,
               "a plane of values of another size");
        call.codecs.push_back({codec, layer, offset});
    }
}

void take_spans(AttentionCall& call, const std::vector<SpanArguments>& spans) {
    for (const auto& [addresses, codecs, pages, position, tokens] : spans) {
        expect(position >= 0 && tokens > 0, "an empty span");
        expect(static_cast<std::size_t>(tokens) <= pages * call.block_tokens, "fewer pages than tokens need");
        const PageSpan span{at<const std::int64_t>(addresses), at<const std::int32_t>(codecs), pages, position, tokens};
        for (std::size_t page = 0; page < pages; page++) {
            bool known = false;
            for (const auto& each : call.codecs) known = known || each.codec == span.codecs[page];
            expect(known, "a codec without its coder");
        }
        call.spans.push_back(span);
    }
}

void take_rows(AttentionCall& call, const std::vector<std::size_t>& starts,
               const std::vector<std::vector<std::uint32_t>>& row_spans) {
    expect(starts.size() == row_spans.size() + 1 && starts.front() == 0 && starts.back() == call.tokens,
           "rows of other tokens");
    for (std::size_t row = 0; row < row_spans.size(); row++) {
        expect(starts[row] <= starts[row + 1], "rows of other tokens");
        std::int64_t last = 0;
        for (const std::uint32_t span : row_spans[row]) {
            expect(span < call.spans.size() && call.spans[span].position >= last, "spans that are out of order");
            last = call.spans[span].stop();
        }
    }
    call.starts = starts;
    call.row_spans = row_spans;
}

bool is_subtree(SubtreeArguments subtree) { return subtree.first <= 31 && subtree.second >> (31 - subtree.first) == 0; }

void take_limits(AttentionCall& call, const std::vector<SubtreeArguments>& row_subtrees) {
    expect(row_subtrees.size() == call.row_spans.size(), "subtrees of other rows");
    const auto whole = limits_of(call.level, call.index);
    for (std::size_t row = 0; row < row_subtrees.size(); row++) {
        expect(is_subtree(row_subtrees[row]), "out of range");
        const auto limits = limits_of(row_subtrees[row].first, row_subtrees[row].second);
        expect(whole.first <= limits.first && limits.second <= whole.second, "a row outside the subtree");
        call.limits.insert(call.limits.end(), call.starts[row + 1] - call.starts[row], limits);
    }
}

bool attend_to(Address query, Address positions, Address out, Address lse, std::size_t tokens, std::size_t query_heads,
               const ShapeArguments& shape, const std::vector<CoderArguments>& coders,
               std::pair<std::size_t, std::size_t> heads, const ScoringArguments& scoring,
               SubtreeArguments subtree, const std::vector<SpanArguments>& spans,
               const std::vector<std::size_t>& starts, const std::vector<std::vector<std::uint32_t>>& row_spans,
               const std::vector<SubtreeArguments>& row_subtrees, std::size_t threads, std::int64_t deadline_ns) {
    AttentionCall call{};
    call.query = at<const float>(query);
    call.positions = at<const std::int64_t>(positions);
    call.out = at<float>(out);
    call.lse = at<float>(lse);
    call.tokens = tokens;
    call.query_heads = query_heads;
    take_shape(call, shape, coders, heads);
    take_spans(call, spans);
    take_rows(call, starts, row_spans);
    call.shape = {std::get<0>(scoring), std::get<1>(scoring), std::get<2>(scoring)};
    call.window = std::get<3>(scoring);
    call.causal = std::get<4>(scoring);
    std::tie(call.level, call.index) = subtree;
    expect(is_subtree(subtree) && call.window >= 0 && threads, "out of range");
    take_limits(call, row_subtrees);
    call.threads = threads;
    call.deadline_ns = deadline_ns;
    const Kernels& chosen = kernels();
    nb::gil_scoped_release others_run;
    return attend(chosen, call);
}

void merge_results(Address out, Address lse, const std::vector<std::pair<std::size_t, std::size_t>>& pairs,
                   std::size_t results, std::size_t rows, std::size_t width) {
    for (const auto& [left, right] : pairs) expect(left < results && right < results && left != right, "no such results");
    const AttentionKernels& chosen = *kernels().attention;
    nb::gil_scoped_release others_run;
    for (const auto& [left, right] : pairs)
        chosen.merge(at<float>(out) + left * rows * width, at<float>(lse) + left * rows,
                     at<const float>(out) + right * rows * width, at<const float>(lse) + right * rows, rows, width);
}

}  // namespace

void bind_attention(nb::module_& m) {
    m.def("attend", &attend_to, nb::arg("query"), nb::arg("positions"), nb::arg("out"), nb::arg("lse"), nb::arg("tokens"),
          nb::arg("query_heads"), nb::arg("shape"), nb::arg("coders"), nb::arg("heads"), nb::arg("scoring"),
          nb::arg("subtree"), nb::arg("spans"), nb::arg("starts"), nb::arg("row_spans"), nb::arg("row_subtrees"),
          nb::arg("threads"), nb::arg("deadline_ns") = 0);
    m.def("merge_results", &merge_results, nb::arg("out"), nb::arg("lse"), nb::arg("pairs"), nb::arg("results"),
          nb::arg("rows"), nb::arg("width"));
}

}  // namespace kvc
