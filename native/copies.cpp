// Batches of copies. A layer whose rows are runs of whole stripes is copied straight between page and rows, and summed on
// the way; a layer that is one run of bytes likewise. Planes whose values have gaps between them go by a stage in the
// cache, the others of such a layer straight. Any other layer is copied to or from the stage, where it is summed. From
// there it is decoded straight into rows, or cut into heads and elements.
#include "copies.hpp"

#include <time.h>

#include <algorithm>
#include <cstring>

namespace kvc {
namespace {

using u8 = std::uint8_t;
using u64 = std::uint64_t;

// The seed of a layer's sum (kvcluster/memory/checksum.py).
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

}  // namespace

std::size_t Geometry::head_bytes() const {
    std::size_t nbytes = 0;
    for (const Plane& plane : planes) nbytes += plane.tokens * plane.elements * plane.element_bytes;
    return nbytes;
}

bool Geometry::rows_are_runs() const {
    return std::all_of(planes.begin(), planes.end(), [](const Plane& plane) { return plane.elements == 1; });
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
    std::size_t page_layer_bytes;
    u8* page;                    // its bytes
    const u8* next;              // those of the record after it; null behind the last

    // The address of the first row that is filled, of the plane and layer whose strides are entries `i` of the geometry.
    u64 first_row(std::size_t i) const {
        return geometry.bases[i] + geometry.rows[block] * static_cast<u64>(geometry.row_strides[i]) +
               memory_head * static_cast<u64>(geometry.head_strides[i]);
    }
};

// ------------------------------------------------------------------------------------------------------- copying

namespace {

// How many bytes a plane of a layer of a page has, with so many heads.
std::size_t plane_bytes(const Plane& plane, std::size_t heads) {
    return plane.tokens * heads * plane.elements * plane.element_bytes;
}

// Whether all planes of a layer are one run, and so the page's bytes of it. `rows` are its planes.
bool one_run(const Rows* rows, std::size_t planes) {
    for (std::size_t plane = 0; plane < planes; plane++) {
        if (rows[plane].inner != 1 || rows[plane].outer != 1) return false;
        if (plane && rows[plane].base != rows[plane - 1].base + rows[plane - 1].run) return false;
    }
    return true;
}

// The most bytes, a power of two, that divide all runs of these rows; 0 if they are fewer than a stripe.
std::size_t step_of(const Rows* rows, std::size_t count) {
    std::size_t bits = kMostStep;
    for (std::size_t i = 0; i < count; i++) bits |= rows[i].run;
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

// Fills rows_ with the planes of each layer, then once more those of the first, and one more. Planes whose values have
// gaps between them lie in the stage.
void BatchRun::rows_of(const Place& place) {
    const Geometry& geometry = place.geometry;
    const std::size_t planes = geometry.planes.size();
    stage_.resize(std::max(stage_.size(), std::max(place.page_layer_bytes, place.heads * geometry.head_bytes())));
    rows_.clear();
    for (std::size_t layer = 0; layer < place.count; layer++) {
        u8* staged = stage_.data();
        for (std::size_t number = 0; number < planes; number++) {
            const Plane& plane = geometry.planes[number];
            u8* const stage = staged;
            staged += plane_bytes(plane, place.heads);
            if (plane.elements != 1) {
                rows_.push_back({stage, plane_bytes(plane, place.heads), 1, 1, 0, 0});
                continue;
            }
            const std::size_t i = (place.memory_layer + layer) * planes + number;
            Rows rows{};
            rows.base = at_address(place.first_row(i));
            rows.run = plane.element_bytes;
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
    for (std::size_t number = 0; number < planes; number++) rows_.push_back(rows_[number]);
    rows_.push_back(rows_.front());
}

// Where the first row that is filled lies, and the strides from there, of one plane and layer.
PlaneRows BatchRun::plane_rows(const Place& place, std::size_t layer, std::size_t number, std::size_t align) const {
    const Geometry& geometry = place.geometry;
    const std::size_t i = (place.memory_layer + layer) * geometry.planes.size() + number;
    const u64 base = place.first_row(i);
    const auto token_stride = static_cast<std::ptrdiff_t>(geometry.token_strides[i]);
    const auto head_stride = static_cast<std::ptrdiff_t>(geometry.head_strides[i]);
    const u64 bits = base | static_cast<u64>(geometry.planes[number].tokens > 1 ? token_stride : 0) |
                     static_cast<u64>(place.fills > 1 ? head_stride : 0);
    return {at_address(base), token_stride, head_stride, place.fill, place.fill + place.fills, nullptr, bits % align == 0};
}

// Copies the heads that are filled between one plane of a raw layer of a page and the caller's memory.
void BatchRun::move_elements(const Kernels& kernels, const Place& place, std::size_t layer, std::size_t number, u8* page, bool into_page) const {
    const Plane& plane = place.geometry.planes[number];
    const PlaneRows rows = plane_rows(place, layer, number, 1);
    const auto stride = place.geometry.element_strides[(place.memory_layer + layer) * place.geometry.planes.size() + number];
    const std::size_t elements = plane.elements, nbytes = plane.element_bytes;
    const std::size_t heads = rows.head_stop - rows.head_start;
    u8* const first = page + rows.head_start * elements * nbytes;
    const auto page_stride = static_cast<std::ptrdiff_t>(place.heads * elements * nbytes);
    if (nbytes == 2 && rows.token_stride == 2 && plane.tokens % kTile == 0 && elements % kTile == 0) {
        for (std::size_t head = 0; head < heads; head++) {
            u8* const memory = rows.base + static_cast<std::ptrdiff_t>(head) * rows.head_stride;
            u8* const bytes = first + head * elements * nbytes;
            if (into_page) kernels.transpose(bytes, page_stride, memory, stride, elements, plane.tokens, Touches::kSource);
            else kernels.transpose(memory, stride, bytes, page_stride, plane.tokens, elements, Touches::kTarget);
        }
        return;
    }
    for (std::size_t token = 0; token < plane.tokens; token++) {
        for (std::size_t head = 0; head < heads; head++) {
            u8* memory = rows.base + static_cast<std::ptrdiff_t>(token) * rows.token_stride +
                         static_cast<std::ptrdiff_t>(head) * rows.head_stride;
            u8* bytes = first + static_cast<std::ptrdiff_t>(token) * page_stride + head * elements * nbytes;
            for (std::size_t element = 0; element < elements; element++, memory += stride, bytes += nbytes)
                into_page ? std::memcpy(bytes, memory, nbytes) : std::memcpy(memory, bytes, nbytes);
        }
    }
}

// Likewise all planes, or those whose values have gaps between them.
void BatchRun::move_planes(const Kernels& kernels, const Place& place, std::size_t layer, u8* page, bool into_page, bool gaps_only) const {
    for (std::size_t number = 0; number < place.geometry.planes.size(); number++) {
        const Plane& plane = place.geometry.planes[number];
        if (plane.elements != 1 || !gaps_only) move_elements(kernels, place, layer, number, page, into_page);
        page += plane_bytes(plane, place.heads);
    }
}

// Decodes the staged layer straight into rows; values with gaps between them by way of a buffer. Decoding is arithmetic and
// writes, so the bytes that are staged next are prefetched meanwhile.
void BatchRun::decode(const Kernels& kernels, const Place& place, std::size_t layer) {
    const LayerShape& shape = place.coded->shape;
    scratch_.resize(std::max(scratch_.size(), shape.scratch));
    u8* from = stage_.data();
    const u8* const next = layer + 1 < place.count ? place.page + (layer + 1) * place.page_layer_bytes : place.next;
    for (std::size_t number = 0; number < shape.planes.size(); from += shape.planes[number++].coded_bytes) {
        const PlaneShape& plane = shape.planes[number];
        if (plane.coding == Coding::kRaw) {
            move_elements(kernels, place, layer, number, from, false);
        } else if (place.geometry.planes[number].elements == 1) {
            PlaneRows rows = plane_rows(place, layer, number, kernels.align);
            rows.ahead = next ? next + (from - stage_.data()) : nullptr;
            kernels.codecs->decode(plane, from, rows, scratch_.data());
        } else {
            decoded_.resize(std::max(decoded_.size(), plane.raw_bytes));
            kernels.codecs->decode(plane, from, dense_rows(plane, decoded_.data()), scratch_.data());
            move_elements(kernels, place, layer, number, decoded_.data(), false);
        }
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
    const auto pages = reinterpret_cast<std::uintptr_t>(batch_.pages);
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
                          at_address(pages + records.offsets[at]),
                          at + 1 < stop ? at_address(pages + records.offsets[at + 1]) : nullptr};
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

// How many bytes every layer of a record can be copied by between a page and rows_; 0 if they have to be staged as a whole.
// A walk through one layer's rows runs ahead into those of the next, so the runs of all of them decide.
std::size_t BatchRun::straight_step(const Place& place) {
    const std::size_t planes = place.geometry.planes.size();
    if (place.coded || place.fills != place.heads) return 0;
    for (std::size_t number = 0; number + 1 < planes; number++) {
        const Plane& plane = place.geometry.planes[number];
        const bool turns = (plane.elements != 1) != (place.geometry.planes[number + 1].elements != 1);
        if (turns && plane_bytes(plane, place.heads) % kSegmentBytes) return 0;
    }
    return step_of(rows_.data(), place.count * planes);
}

// Copies a raw layer of a page into its planes, and returns the sum of what was written.
u64 BatchRun::scatter(const Kernels& kernels, const Place& place, const Rows* rows, const u8* page, std::size_t step,
                      u64 seed) {
    const std::vector<Plane>& planes = place.geometry.planes;
    segments_.clear();
    for (std::size_t start = 0, stop = 0; start < planes.size(); start = stop) {
        const bool gaps = planes[start].elements != 1;
        std::size_t nbytes = 0;
        for (; stop < planes.size() && (planes[stop].elements != 1) == gaps; stop++)
            nbytes += plane_bytes(planes[stop], place.heads);
        segments_.push_back({rows + start, nbytes, !gaps && aligned(rows + start, stop - start, kernels.align)});
    }
    return kernels.scatter(segments_.data(), segments_.size(), page, step, seed);
}

std::uint8_t BatchRun::load(const Kernels& kernels, const Place& place) {
    const std::size_t planes = place.geometry.planes.size(), nbytes = place.page_layer_bytes;
    const u64* const expected = batch_.records.sums + batch_.records.sum_starts[place.at];
    const u64 identity = batch_.identities[place.at];
    const bool rows_are_runs = place.geometry.rows_are_runs();
    const std::size_t step = straight_step(place);
    for (std::size_t layer = 0; layer < place.count; layer++) {
        const Rows* const rows = rows_.data() + layer * planes;
        u8* const page = place.page + layer * nbytes;
        const u64 seed = seed_of(identity, place.first + layer, nbytes);
        const Layers one{1, nbytes, seed, 0};
        const bool raw = !place.coded && place.fills == place.heads && rows_are_runs && one_run(rows, planes);
        u64 sum = 0;
        if (raw) kernels.copy_sums(rows->base, page, one, &sum);
        else if (step) sum = scatter(kernels, place, rows, page, step, seed);
        else kernels.stage_sums(stage_.data(), page, one, &sum);
        if (sum != expected[layer]) return kMismatch;
        if (place.coded) decode(kernels, place, layer);
        else if (!raw) move_planes(kernels, place, layer, stage_.data(), false, step != 0);
    }
    return kDone;
}

void BatchRun::store(const Kernels& kernels, const Place& place) {
    const std::size_t planes = place.geometry.planes.size(), nbytes = place.page_layer_bytes;
    const bool rows_are_runs = place.geometry.rows_are_runs();
    const std::size_t step = straight_step(place);
    u64* const sums = batch_.records.sums + batch_.records.sum_starts[place.at];
    const bool past_caches = batch_.pages != nullptr;  // the stage of a stream is sent at once
    for (std::size_t layer = 0; layer < place.count; layer++) {
        const Rows* const rows = rows_.data() + layer * planes;
        u8* const page = place.page + layer * nbytes;
        const u64 seed = seed_of(batch_.identities[place.at], place.first + layer, nbytes);
        const Layers one{1, nbytes, seed, 0};
        const auto copy_sums = past_caches ? kernels.copy_sums : kernels.stage_sums;
        if (rows_are_runs && one_run(rows, planes)) {
            copy_sums(page, rows->base, one, sums + layer);
            continue;
        }
        move_planes(kernels, place, layer, stage_.data(), true, step != 0);
        if (step) {
            const bool streaming = past_caches && (reinterpret_cast<std::uintptr_t>(page) | nbytes) % kernels.align == 0;
            sums[layer] = kernels.gather(page, rows, nbytes, step, seed, streaming);
        } else {
            copy_sums(page, stage_.data(), one, sums + layer);
        }
    }
}

}  // namespace kvc
