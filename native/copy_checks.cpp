// Checks a batch of copies, once: that every number in it means bytes that the batch names, and that no two records write
// to the same ones. What is wrong is said with the numbers that contradict.
#include <algorithm>
#include <sstream>
#include <tuple>

#include "copies.hpp"

namespace kvc {
namespace {

using u64 = std::uint64_t;

// What is wrong with a row: "record 3 names item 9; there are 4".
template <typename... Rest>
std::string text(const Rest&... rest) {
    std::ostringstream all;
    (all << ... << rest);
    return all.str();
}

// What a stride adds to an address; what is beyond all addresses stays so, and does not overflow where it is added up.
using Wide = __int128;

Wide reach_of(u64 count, std::int64_t stride) {
    constexpr Wide most = Wide{1} << 66;
    return std::clamp(Wide{count} * stride, -most, most);
}

// Whether a codec's planes are those of the memory, so that what is decoded stays within its rows.
bool fits(const LayerShape& shape, const Geometry& geometry, std::size_t heads) {
    if (shape.planes.size() != geometry.planes.size()) return false;
    for (std::size_t number = 0; number < shape.planes.size(); number++) {
        const PlaneShape& coded = shape.planes[number];
        const Plane& plane = geometry.planes[number];
        if (coded.raw_bytes != plane.tokens * heads * plane.elements * plane.element_bytes) return false;
        if (coded.coding != Coding::kRaw && (coded.tokens != plane.tokens || coded.heads != heads)) return false;
    }
    return true;
}

}  // namespace

std::string Geometry::refusal() const {
    if (layer_stop < layer_start || head_stop <= head_start) return "a geometry without layers or heads";
    const u64 heads = head_stop - head_start;
    u64 layer = 0;
    for (const Plane& plane : planes) {
        u64 nbytes = heads;
        for (const u64 factor : {u64{plane.tokens}, u64{plane.elements}, u64{plane.element_bytes}})
            if (__builtin_mul_overflow(nbytes, factor, &nbytes)) return "a plane of too many bytes";
        if (__builtin_add_overflow(layer, nbytes, &layer)) return "a layer of too many bytes";
    }
    const auto [least, most] = std::minmax_element(rows, rows + blocks);
    for (std::size_t i = 0; blocks && i < (layer_stop - layer_start) * planes.size(); i++) {
        const Plane& plane = planes[i % planes.size()];
        if (buffers && row_strides[i] != 1) return "rows that are addresses must have a stride of 1";
        const Wide low = buffers ? 0 : reach_of(*least, row_strides[i]), high = buffers ? 0 : reach_of(*most, row_strides[i]);
        Wide first = bases[i] + std::min(low, high), last = bases[i] + std::max(low, high) + plane.element_bytes;
        for (const Wide reach : {reach_of(plane.tokens - 1, token_strides[i]), reach_of(heads - 1, head_strides[i]),
                                 reach_of(plane.elements - 1, element_strides[i])})
            (reach < 0 ? first : last) += reach;
        if (first < Wide{spans[2 * i]} || last > Wide{spans[2 * i + 1]})
            return text("layer ", i / planes.size(), " of plane ", i % planes.size(), " reaches beyond its memory");
    }
    return {};
}

BatchRun::BatchRun(const Batch& batch) : batch_(batch) { check(); }

void BatchRun::check() {
    const Records& records = batch_.records;
    if (records.sum_count) {
        u64 layers = 0;
        bool apart = false;
        for (std::size_t at = 0; at < records.count; at++) {
            apart = apart || records.sum_starts[at] != layers;
            layers += records.counts[at];
        }
        if (apart || layers != records.sum_count)
            refusal_ = text("there must be one sum for each layer: ", records.sum_count, " for ", layers);
    } else if (records.count) {
        refusal_ = "there must be one sum for each layer: there are none";
    }
    if (!refusal_.empty()) return;
    check_items();
    for (std::size_t at = 0; at < records.count && refusal_.empty(); at++)
        if (batch_.status[at] == kPending) check_record(at);
    if (refusal_.empty()) check_overlaps();
}

void BatchRun::check_items() {
    const Items& items = batch_.items;
    for (std::size_t item = 0; item < items.count; item++) {
        const std::size_t group = items.groups[item];
        const Geometry* geometry = group < batch_.geometries.size() ? batch_.geometries[group] : nullptr;
        if (!geometry) {
            refusal_ = text("item ", item, " is of group ", group, ", for which there is no memory");
            return;
        }
        const std::size_t first = std::max<std::size_t>(items.head_starts[item], geometry->head_start);
        const std::size_t last = std::min<std::size_t>(items.head_stops[item], geometry->head_stop);
        const std::size_t start = items.fill_starts[item], stop = items.fill_stops[item];
        if (items.blocks[item] >= geometry->blocks) {
            refusal_ = text("item ", item, " is of block ", items.blocks[item], "; there are ", geometry->blocks);
        } else if (!(first <= start && start < stop && stop <= last)) {
            refusal_ = text("item ", item, " fills heads ", start, " to ", stop, " of ", first, " to ", last);
        }
        if (!refusal_.empty()) return;
    }
}

void BatchRun::check_record(std::size_t at) {
    const Records& records = batch_.records;
    const Items& items = batch_.items;
    const u64 item = records.items[at], layer = records.layers[at], count = records.counts[at], codec = records.codecs[at];
    if (item >= items.count) {
        refusal_ = text("record ", at, " names item ", item, "; there are ", items.count);
        return;
    }
    const Geometry& geometry = *batch_.geometries[items.groups[item]];
    const u64 start = items.layer_starts[item] + layer, stop = start + count;
    if (!count || stop > items.layer_stops[item] || start < geometry.layer_start || stop > geometry.layer_stop) {
        refusal_ = text("record ", at, " has layers ", start, " to ", stop, ", which its page or its memory does not have");
        return;
    }
    const u64 heads = items.head_stops[item] - items.head_starts[item];
    u64 layer_bytes = 0, record_bytes = 0;
    if (__builtin_mul_overflow(heads, geometry.head_bytes(), &layer_bytes)) {
        refusal_ = text("record ", at, " has layers of too many bytes");
        return;
    }
    if (codec != kRawCodec) {
        const auto same = [&](const Coded& each) {
            return each.codec == codec && each.group == items.groups[item] && each.heads == heads;
        };
        const auto found = std::find_if(batch_.coded.begin(), batch_.coded.end(), same);
        if (found == batch_.coded.end() || !fits(found->shape, geometry, heads)) {
            refusal_ = text("record ", at, " is in codec ", codec, ", which is not known");
            return;
        }
        layer_bytes = found->shape.coded_bytes;
        able_ = able_ && batch_.load;
    }
    if (layer_bytes < kLeastLayerBytes) able_ = false;
    if (!batch_.load && (items.fill_starts[item] != items.head_starts[item] || items.fill_stops[item] != items.head_stops[item]))
        able_ = false;
    const u64 nbytes = records.nbytes[at], offset = records.offsets[at];
    if (__builtin_mul_overflow(count, layer_bytes, &record_bytes) || nbytes != record_bytes) {
        refusal_ = text("record ", at, " has ", nbytes, " bytes for ", count, " layers of ", layer_bytes);
    } else if (nbytes > batch_.most_record_bytes && count > 1) {
        refusal_ = text("record ", at, " has ", nbytes, " bytes, more than may still be written after a cancel");
    } else if (nbytes > batch_.page_bytes || offset > batch_.page_bytes - nbytes) {
        refusal_ = text("record ", at, " begins at ", offset, " and reaches beyond the ", batch_.page_bytes, " bytes of its pages");
    }
}

void BatchRun::check_overlaps() {
    const Records& records = batch_.records;
    const Items& items = batch_.items;
    using Span = std::tuple<u64, u64, u64, u64, u64>;  // group, block, item, layers
    std::vector<Span> spans;
    for (std::size_t at = 0; at < records.count; at++) {
        if (batch_.status[at] != kPending) continue;
        const u64 item = records.items[at], start = items.layer_starts[item] + records.layers[at];
        spans.emplace_back(items.groups[item], items.blocks[item], item, start, start + records.counts[at]);
    }
    std::sort(spans.begin(), spans.end());
    for (std::size_t i = 0; i < spans.size() && refusal_.empty(); i++) {
        const auto& [group, block, item, start, stop] = spans[i];
        for (std::size_t j = i + 1; j < spans.size(); j++) {
            const auto& [other_group, other_block, other, other_start, other_stop] = spans[j];
            if (other_group != group || other_block != block) break;
            const bool heads = items.fill_starts[item] < items.fill_stops[other] && items.fill_starts[other] < items.fill_stops[item];
            if (heads && start < other_stop && other_start < stop) {
                refusal_ = text("records of items ", item, " and ", other, " overlap in block ", block);
                break;
            }
        }
    }
}

}  // namespace kvc
