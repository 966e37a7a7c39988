// Batches of copies. A layer whose rows are runs of whole stripes is copied straight between page and rows, and summed on
// the way; a layer that is one run of bytes likewise. Any other is copied to or from a stage in the cache, where it is
// summed, decoded, and cut into heads and elements.
#include "copies.hpp"

#include <time.h>

#include <algorithm>
#include <cstring>
#include <sstream>
#include <tuple>

namespace kvc {
namespace {

using u8 = std::uint8_t;
using u64 = std::uint64_t;

// The seed of a layer's sum (kvcluster/pages/checksum.py).
constexpr u64 kLayerFactor = 0x9E3779B97F4A7C15, kBytesFactor = 0xC2B2AE3D27D4EB4F;
constexpr std::size_t kLeastStep = 64, kMostStep = 1024;

// Addresses are sums of numbers that wrap around, and become pointers last.
u8* at_address(u64 address) { return reinterpret_cast<u8*>(static_cast<std::uintptr_t>(address)); }

u64 seed_of(u64 identity, u64 layer, u64 nbytes) { return identity + layer * kLayerFactor + nbytes * kBytesFactor; }

// As Python's time.monotonic_ns.
std::int64_t now_ns() {
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1'000'000'000LL + now.tv_nsec;
}

// What a stride adds to an address; what is beyond all addresses stays so, and does not overflow where it is added up.
using Wide = __int128;

Wide reach_of(u64 count, std::int64_t stride) {
    constexpr Wide most = Wide{1} << 66;
    return std::clamp(Wide{count} * stride, -most, most);
}

// What is wrong with a row: "record 3 names item 9; there are 4".
template <typename... Rest>
std::string text(const Rest&... rest) {
    std::ostringstream all;
    (all << ... << rest);
    return all.str();
}

}  // namespace

std::size_t Geometry::head_bytes() const {
    std::size_t nbytes = 0;
    for (const Plane& plane : planes) nbytes += plane.tokens * plane.elements * plane.element_bytes;
    return nbytes;
}

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

struct BatchRun::Place {
    std::size_t at;              // the record
    const Geometry& geometry;
    const Coded* coded;          // null for raw pages
    std::size_t first, count;    // its layers: the first counted in the page, and how many
    std::size_t memory_layer;    // the first counted in the geometry
    std::size_t block;
    std::size_t heads;           // of the page
    std::size_t fill, fills;     // the first head that is filled, counted in the page, and how many
    std::size_t memory_head;     // the first head that is filled, counted in the geometry
    std::size_t page_layer_bytes, raw_layer_bytes;
    u8* page;                    // its bytes
};

// -------------------------------------------------------------------------------------------------------- checks

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
        if (found == batch_.coded.end() || found->shape.raw_bytes != layer_bytes) {
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

// ------------------------------------------------------------------------------------------------------- copying

namespace {

// Whether all planes of a layer are one run, and so the page's bytes of it. `rows` are its planes.
bool one_run(const Rows* rows, std::size_t planes) {
    for (std::size_t plane = 0; plane < planes; plane++) {
        if (rows[plane].inner != 1 || rows[plane].outer != 1) return false;
        if (plane && rows[plane].base != rows[plane - 1].base + rows[plane - 1].run) return false;
    }
    return true;
}

// The most bytes, a power of two, that divide all runs of the rows; 0 if they are fewer than a stripe.
std::size_t step_of(const Rows* rows, std::size_t planes) {
    std::size_t bits = kMostStep;
    for (std::size_t plane = 0; plane < planes; plane++) bits |= rows[plane].run;
    const std::size_t step = bits & (~bits + 1);
    return step >= kLeastStep ? step : 0;
}

bool aligned(const Rows* rows, std::size_t planes, std::size_t align) {
    std::uintptr_t bits = 0;
    for (std::size_t plane = 0; plane < planes; plane++) {
        const Rows& each = rows[plane];
        bits |= reinterpret_cast<std::uintptr_t>(each.base) | each.run;
        if (each.inner > 1) bits |= static_cast<std::uintptr_t>(each.inner_stride);
        if (each.outer > 1) bits |= static_cast<std::uintptr_t>(each.outer_stride);
    }
    return bits % align == 0;
}

}  // namespace

// Fills rows_ with the planes of each layer, then once more those of the first, and one more.
void BatchRun::rows_of(const Place& place) {
    const Geometry& geometry = place.geometry;
    const std::size_t planes = geometry.planes.size();
    rows_.clear();
    for (std::size_t layer = 0; layer < place.count; layer++) {
        for (std::size_t number = 0; number < planes; number++) {
            const Plane& plane = geometry.planes[number];
            const std::size_t i = (place.memory_layer + layer) * planes + number;
            const u64 row = geometry.rows[place.block] * static_cast<u64>(geometry.row_strides[i]);
            const u64 head = place.memory_head * static_cast<u64>(geometry.head_strides[i]);
            Rows rows{};
            rows.base = at_address(geometry.bases[i] + row + head);
            rows.run = plane.elements * plane.element_bytes;
            rows.inner = place.fills;
            rows.inner_stride = static_cast<std::ptrdiff_t>(geometry.head_strides[i]);
            rows.outer = plane.tokens;
            rows.outer_stride = static_cast<std::ptrdiff_t>(geometry.token_strides[i]);
            if (rows.inner == 1 || rows.inner_stride == static_cast<std::ptrdiff_t>(rows.run)) {
                rows.run *= rows.inner;
                rows.inner = rows.outer;
                rows.inner_stride = rows.outer_stride;
                rows.outer = 1;
                if (rows.inner == 1 || rows.inner_stride == static_cast<std::ptrdiff_t>(rows.run)) {
                    rows.run *= rows.inner;
                    rows.inner = 1;
                }
            }
            rows_.push_back(rows);
        }
    }
    rows_.insert(rows_.end(), rows_.begin(), rows_.begin() + static_cast<std::ptrdiff_t>(planes));
    rows_.push_back(rows_.front());
}

// Copies the heads that are filled between a raw layer of a page and the caller's memory.
void BatchRun::move_elements(const Place& place, std::size_t layer, u8* page, bool into_page) const {
    const Geometry& geometry = place.geometry;
    const std::size_t planes = geometry.planes.size();
    const auto move = [&](u8* memory, u8* bytes, std::size_t nbytes) {
        into_page ? std::memcpy(bytes, memory, nbytes) : std::memcpy(memory, bytes, nbytes);
    };
    for (std::size_t number = 0; number < planes; number++) {
        const Plane& plane = geometry.planes[number];
        const std::size_t i = (place.memory_layer + layer) * planes + number, row = plane.elements * plane.element_bytes;
        const u64 start = geometry.bases[i] + geometry.rows[place.block] * static_cast<u64>(geometry.row_strides[i]);
        for (std::size_t token = 0; token < plane.tokens; token++) {
            for (std::size_t head = 0; head < place.fills; head++) {
                const u64 inner = token * static_cast<u64>(geometry.token_strides[i]) +
                                  (place.memory_head + head) * static_cast<u64>(geometry.head_strides[i]);
                u8* const bytes = page + (token * place.heads + place.fill + head) * row;
                for (std::size_t element = 0; element < plane.elements; element++) {
                    const u64 at = start + inner + element * static_cast<u64>(geometry.element_strides[i]);
                    move(at_address(at), bytes + element * plane.element_bytes, plane.element_bytes);
                }
            }
        }
        page += plane.tokens * place.heads * row;
    }
}

bool BatchRun::stopped(std::size_t at) const {
    // Python sets both while this runs. What it has written before is not read here, so no order is needed.
    return __atomic_load_n(batch_.cancel, __ATOMIC_RELAXED) ||
           __atomic_load_n(batch_.dropped + batch_.records.items[at], __ATOMIC_RELAXED) || now_ns() >= batch_.deadline_ns;
}

void BatchRun::run(const Kernels& kernels, std::size_t start, std::size_t stop) {
    const Records& records = batch_.records;
    const Items& items = batch_.items;
    for (std::size_t at = start; at < stop; at++) {
        if (batch_.status[at] != kPending) continue;
        if (stopped(at)) {
            batch_.status[at] = kStopped;
            continue;
        }
        const std::size_t item = records.items[at], group = items.groups[item], layer = records.layers[at];
        const std::size_t heads = items.head_stops[item] - items.head_starts[item];
        const Geometry& geometry = *batch_.geometries[group];
        const Coded* coded = nullptr;
        for (const Coded& each : batch_.coded)
            if (each.codec == records.codecs[at] && each.group == group && each.heads == heads) coded = &each;
        const Place place{at,
                          geometry,
                          coded,
                          layer,
                          records.counts[at],
                          items.layer_starts[item] + layer - geometry.layer_start,
                          items.blocks[item],
                          heads,
                          items.fill_starts[item] - items.head_starts[item],
                          items.fill_stops[item] - items.fill_starts[item],
                          items.fill_starts[item] - geometry.head_start,
                          records.nbytes[at] / records.counts[at],
                          heads * geometry.head_bytes(),
                          at_address(reinterpret_cast<std::uintptr_t>(batch_.pages) + records.offsets[at])};
        rows_of(place);
        std::uint8_t status = kDone;
        if (batch_.load) {
            status = load(kernels, place);
        } else {
            store(kernels, place);
        }
        kernels.fence();
        batch_.status[at] = status;
    }
}

void BatchRun::run_now(const Kernels& kernels, const Records& records, u8* pages, std::size_t page_bytes) {
    batch_.records = records;
    batch_.pages = pages;
    batch_.page_bytes = page_bytes;
    past_caches_ = false;
    able_ = true;
    refusal_.clear();
    for (std::size_t at = 0; at < records.count && refusal_.empty(); at++) check_record(at);
    if (refusal_.empty() && !able_) refusal_ = "layers that are too short, or heads of which only some are stored";
    if (refusal_.empty()) run(kernels, 0, records.count);
}

std::uint8_t BatchRun::load(const Kernels& kernels, const Place& place) {
    const std::size_t planes = place.geometry.planes.size(), nbytes = place.page_layer_bytes;
    const bool whole = place.fills == place.heads;
    const u64* const expected = batch_.records.sums + batch_.records.sum_starts[place.at];
    const u64 identity = batch_.identities[place.at];
    const bool rows_are_runs = std::all_of(place.geometry.planes.begin(), place.geometry.planes.end(),
                                           [](const Plane& plane) { return plane.elements == 1; });
    for (std::size_t layer = 0; layer < place.count; layer++) {
        const Rows* const rows = rows_.data() + layer * planes;
        u8* const page = place.page + layer * nbytes;
        const u64 seed = seed_of(identity, place.first + layer, nbytes);
        const Layers one{1, nbytes, seed, 0};
        const bool straight = whole && rows_are_runs;
        u8* const run = straight && one_run(rows, planes) ? rows->base : nullptr;
        const std::size_t step = straight ? step_of(rows, planes) : 0;
        u64 sum = 0;
        if (!place.coded && run) {
            kernels.copy_sums(run, page, one, &sum);
        } else if (!place.coded && step) {
            sum = kernels.scatter(rows, page, nbytes, step, seed, aligned(rows, planes, kernels.align));
        } else {
            stage_.resize(std::max(stage_.size(), nbytes));
            kernels.stage_sums(stage_.data(), page, one, &sum);
        }
        if (sum != expected[layer]) return kMismatch;
        if (!place.coded && (run || step)) continue;
        u8* raw = stage_.data();
        if (place.coded) {
            scratch_.resize(std::max(scratch_.size(), scratch_floats(place.coded->shape)));
            decoded_.resize(std::max(decoded_.size(), place.raw_layer_bytes));
            raw = run ? run : decoded_.data();
            decode_layer(place.coded->shape, stage_.data(), raw, scratch_.data());
        }
        if (!run) move_elements(place, layer, raw, false);
    }
    return kDone;
}

void BatchRun::store(const Kernels& kernels, const Place& place) {
    const std::size_t planes = place.geometry.planes.size(), nbytes = place.page_layer_bytes;
    const bool rows_are_runs = std::all_of(place.geometry.planes.begin(), place.geometry.planes.end(),
                                           [](const Plane& plane) { return plane.elements == 1; });
    u64* const sums = batch_.records.sums + batch_.records.sum_starts[place.at];
    for (std::size_t layer = 0; layer < place.count; layer++) {
        const Rows* const rows = rows_.data() + layer * planes;
        u8* const page = place.page + layer * nbytes;
        const u64 seed = seed_of(batch_.identities[place.at], place.first + layer, nbytes);
        const Layers one{1, nbytes, seed, 0};
        const std::size_t step = rows_are_runs ? step_of(rows, planes) : 0;
        const auto copy_sums = past_caches_ ? kernels.copy_sums : kernels.stage_sums;
        if (rows_are_runs && one_run(rows, planes)) {
            copy_sums(page, rows->base, one, sums + layer);
        } else if (step) {
            const bool past_caches =
                past_caches_ && (reinterpret_cast<std::uintptr_t>(page) | nbytes) % kernels.align == 0;
            sums[layer] = kernels.gather(page, rows, nbytes, step, seed, past_caches);
        } else {
            stage_.resize(std::max(stage_.size(), nbytes));
            move_elements(place, layer, stage_.data(), true);
            copy_sums(page, stage_.data(), one, sums + layer);
        }
    }
}

}  // namespace kvc
