// A batch of copies (kvcluster/pages/copy_batch.py) in native memory: checked once, then carried out record by record.
// It knows nothing of Python. docs/copies.md describes the columns.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "codecs.hpp"
#include "kernels.hpp"

namespace kvc {

// One plane of one block and layer in the caller's memory: `elements` of `element_bytes` each make up a row, the bytes of
// one head of one token.
struct Plane {
    std::size_t tokens;
    std::size_t elements;
    std::size_t element_bytes;
};

// Where the blocks of one group lie: an entry of `bases` and of each stride column for each (layer, plane). Its bytes lie
// between two addresses of `spans`; if blocks are separate buffers, between two offsets within each.
struct Geometry {
    std::size_t layer_start, layer_stop, head_start, head_stop;
    std::vector<Plane> planes;
    const std::uint64_t* rows;
    std::size_t blocks;
    const std::uint64_t* bases;
    const std::int64_t* row_strides;
    const std::int64_t* token_strides;
    const std::int64_t* head_strides;
    const std::int64_t* element_strides;
    const std::uint64_t* spans;
    bool buffers;

    std::size_t head_bytes() const;  // of one head in one layer, all planes
    bool rows_are_runs() const;      // the values of each row lie beside each other, in all planes
    std::string refusal() const;     // what is wrong with these numbers; empty if all bytes lie within their spans
};

struct Items {
    std::size_t count;
    const std::uint32_t *groups, *blocks, *layer_starts, *layer_stops, *head_starts, *head_stops, *fill_starts,
        *fill_stops;
};

struct Records {
    std::size_t count;
    const std::uint32_t *items, *layers, *counts;
    const std::uint64_t *offsets, *nbytes, *codecs;
    const std::uint32_t* sum_starts;
    std::uint64_t* sums;
    std::size_t sum_count;
};

enum Status : std::uint8_t { kPending = 0, kDone = 1, kMismatch = 2, kUnreadable = 3, kStopped = 4 };

// How layers of one codec, group and number of heads are decoded.
struct Coded {
    std::uint64_t codec;
    std::uint32_t group;
    std::size_t heads;
    LayerShape shape;
};

struct Batch {
    bool load;
    std::uint8_t* pages;     // offsets count from here; null if they are addresses, of private memory
    std::size_t page_bytes;  // how many there are
    std::vector<const Geometry*> geometries;  // by group; null if the group is not moved
    Items items;
    Records records;
    std::vector<Coded> coded;
    const std::uint64_t* identities;
    std::uint8_t* status;
    const std::uint32_t* cancel;
    const std::uint8_t* dropped;
    std::int64_t deadline_ns;
    std::size_t most_record_bytes;  // of a record of several layers
};

constexpr std::uint64_t kRawCodec = 1;  // kvcluster/core/codecs.py

// Carries out a batch. `refusal` says what is wrong with it, and is empty for one that may be run.
class BatchRun {
  public:
    explicit BatchRun(const Batch& batch);

    const std::string& refusal() const { return refusal_; }
    // Whether every pending record can be carried out here: its codec is known and its layers are long enough.
    bool able() const { return able_; }
    void run(const Kernels& kernels, std::size_t start, std::size_t stop);

  private:
    struct Place;  // of one record

    void check();
    void check_items();
    void check_record(std::size_t at);
    void check_overlaps();
    bool stopped(std::size_t at) const;
    std::uint8_t load(const Kernels& kernels, const Place& place);
    void store(const Kernels& kernels, const Place& place);
    void rows_of(const Place& place);
    std::size_t straight_step(const Place& place);
    std::uint64_t scatter(const Kernels& kernels, const Place& place, const Rows* rows, const std::uint8_t* page, std::size_t step, std::uint64_t seed);
    PlaneRows plane_rows(const Place& place, std::size_t layer, std::size_t plane, std::size_t align) const;
    void move_elements(const Kernels& kernels, const Place& place, std::size_t layer, std::size_t plane, std::uint8_t* page,
                       bool into_page) const;
    void move_planes(const Kernels& kernels, const Place& place, std::size_t layer, std::uint8_t* page, bool into_page,
                     bool gaps_only) const;
    void decode(const Kernels& kernels, const Place& place, std::size_t layer);

    Batch batch_;
    std::string refusal_;
    bool able_ = true;
    std::vector<Rows> rows_;  // of the record under way, and of what is prefetched after it
    std::vector<RowSegment> segments_;
    std::vector<std::uint8_t> stage_, decoded_;
    std::vector<float> scratch_;
};

}  // namespace kvc
