// Copies, for Python: a batch of copies that native threads carry out. Checks the columns, which it keeps alive, and lets
// other threads run meanwhile.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <array>
#include <limits>
#include <memory>
#include <stdexcept>
#include <vector>

#include "bytes.hpp"
#include "copies.hpp"
#include "modules.hpp"

namespace nb = nanobind;

namespace kvc {
namespace {

// Columns of numbers, which must not be resized as long as this lives.
class Columns {
  public:
    template <typename Number>
    Number* of(nb::handle column, std::size_t count, bool writable = false) {
        const Bytes& bytes = hold(column, writable);
        if (bytes.size() % sizeof(Number) || bytes.size() / sizeof(Number) != count)
            throw std::invalid_argument("columns of other lengths");
        if (count && reinterpret_cast<std::uintptr_t>(bytes.data()) % alignof(Number))
            throw std::invalid_argument("a column is not aligned to its numbers");
        return reinterpret_cast<Number*>(bytes.data());
    }
    const Bytes& hold(nb::handle object, bool writable) {
        held_.push_back(std::make_unique<Bytes>(object, writable));
        return *held_.back();
    }

  private:
    std::vector<std::unique_ptr<Bytes>> held_;
};

template <typename Number>
std::size_t length(nb::handle column) {
    return Bytes(column, false).size() / sizeof(Number);
}

// Calls `build`, and refuses values of other types than it casts them to.
template <typename Build>
auto typed(const Build& build) {
    try {
        return build();
    } catch (const std::bad_cast&) {
        throw nb::type_error("a descriptor has a value of another type, or beyond its range");
    }
}

// (part as 4 numbers, planes as (tokens, elements, element_bytes), rows, bases, four columns of strides, two addresses for
// each base, whether rows are addresses)
Geometry geometry_of(nb::handle given, Columns& columns) {
    const auto all = nb::cast<nb::tuple>(given);
    if (all.size() != 10) throw std::invalid_argument("a geometry has ten entries");
    Geometry geometry{};
    const auto part = nb::cast<nb::tuple>(all[0]);
    if (part.size() != 4) throw std::invalid_argument("a part has four numbers");
    geometry.layer_start = nb::cast<std::size_t>(part[0]);
    geometry.layer_stop = nb::cast<std::size_t>(part[1]);
    geometry.head_start = nb::cast<std::size_t>(part[2]);
    geometry.head_stop = nb::cast<std::size_t>(part[3]);
    for (const nb::handle each : nb::cast<nb::tuple>(all[1])) {
        const auto plane = nb::cast<nb::tuple>(each);
        if (plane.size() != 3) throw std::invalid_argument("a plane has three numbers");
        geometry.planes.push_back(
            {nb::cast<std::size_t>(plane[0]), nb::cast<std::size_t>(plane[1]), nb::cast<std::size_t>(plane[2])});
        const Plane& made = geometry.planes.back();
        if (!made.tokens || !made.elements || !made.element_bytes) throw std::invalid_argument("a plane without bytes");
    }
    std::size_t places = 0;
    if (geometry.planes.empty() || geometry.layer_stop < geometry.layer_start ||
        __builtin_mul_overflow(geometry.layer_stop - geometry.layer_start, 2 * geometry.planes.size(), &places))
        throw std::invalid_argument("a geometry without planes, or with wrong layers");
    places /= 2;
    geometry.blocks = length<std::uint64_t>(all[2]);
    geometry.rows = columns.of<std::uint64_t>(all[2], geometry.blocks);
    geometry.bases = columns.of<std::uint64_t>(all[3], places);
    geometry.row_strides = columns.of<std::int64_t>(all[4], places);
    geometry.token_strides = columns.of<std::int64_t>(all[5], places);
    geometry.head_strides = columns.of<std::int64_t>(all[6], places);
    geometry.element_strides = columns.of<std::int64_t>(all[7], places);
    geometry.spans = columns.of<std::uint64_t>(all[8], 2 * places);
    geometry.buffers = nb::cast<bool>(all[9]);
    const std::string refusal = geometry.refusal();
    if (!refusal.empty()) throw std::invalid_argument(refusal);
    return geometry;
}

Items items_of(const nb::tuple& given, Columns& columns) {
    if (given.size() != 8) throw std::invalid_argument("items have eight columns");
    Items items{};
    items.count = length<std::uint32_t>(given[0]);
    const std::uint32_t** const into[] = {&items.groups,      &items.blocks,     &items.layer_starts, &items.layer_stops,
                                          &items.head_starts, &items.head_stops, &items.fill_starts,  &items.fill_stops};
    for (std::size_t i = 0; i < 8; i++) *into[i] = columns.of<std::uint32_t>(given[i], items.count);
    return items;
}

Records records_of(const nb::tuple& given, Columns& columns) {
    if (given.size() != 8) throw std::invalid_argument("records have eight columns");
    Records records{};
    records.count = length<std::uint32_t>(given[0]);
    records.items = columns.of<std::uint32_t>(given[0], records.count);
    records.layers = columns.of<std::uint32_t>(given[1], records.count);
    records.counts = columns.of<std::uint32_t>(given[2], records.count);
    records.offsets = columns.of<std::uint64_t>(given[3], records.count);
    records.nbytes = columns.of<std::uint64_t>(given[4], records.count);
    records.codecs = columns.of<std::uint64_t>(given[5], records.count);
    records.sum_starts = columns.of<std::uint32_t>(given[6], records.count);
    records.sum_count = length<std::uint64_t>(given[7]);
    records.sums = columns.of<std::uint64_t>(given[7], records.sum_count, true);
    return records;
}

// (codec, group, heads, coder) of each kind of encoded page
std::vector<Coded> coded_of(const nb::list& given) {
    std::vector<Coded> all;
    for (const nb::handle each : given) {
        const auto one = nb::cast<nb::tuple>(each);
        if (one.size() != 4) throw std::invalid_argument("a codec has four entries");
        all.push_back({nb::cast<std::uint64_t>(one[0]), nb::cast<std::uint32_t>(one[1]), nb::cast<std::size_t>(one[2]),
                       shape_of(one[3])});
    }
    return all;
}

// By group; null where there is no memory.
std::vector<const Geometry*> geometries_of(const nb::tuple& given, std::vector<Geometry>& own, Columns& columns) {
    std::vector<const Geometry*> all;
    own.reserve(given.size());
    for (const nb::handle each : given) {
        if (!each.is_none()) own.push_back(geometry_of(each, columns));
        all.push_back(each.is_none() ? nullptr : &own.back());
    }
    return all;
}

class Copies {
  public:
    Copies(bool load, nb::object pages, const nb::tuple& geometries, const nb::tuple& items, const nb::tuple& records,
           const nb::list& coded, nb::handle identities, nb::handle status, nb::handle cancel, nb::handle dropped,
           std::int64_t deadline_ns, std::size_t most_record_bytes) {
        Batch batch{};
        batch.load = load;
        batch.pages = nullptr;
        batch.page_bytes = std::numeric_limits<std::size_t>::max();
        if (!pages.is_none()) {
            const Bytes& bytes = columns_.hold(pages, !load);
            batch.pages = bytes.data();
            batch.page_bytes = bytes.size();
        }
        batch.geometries = typed([&] { return geometries_of(geometries, geometries_, columns_); });
        batch.items = items_of(items, columns_);
        batch.records = records_of(records, columns_);
        batch.coded = typed([&] { return coded_of(coded); });
        count_ = batch.records.count;
        batch.identities = columns_.of<std::uint64_t>(identities, count_);
        batch.status = columns_.of<std::uint8_t>(status, count_, true);
        if (length<std::uint32_t>(cancel) != 1) throw std::invalid_argument("`cancel` must have one element");
        batch.cancel = columns_.of<std::uint32_t>(cancel, 1);
        batch.dropped = columns_.of<std::uint8_t>(dropped, batch.items.count);
        batch.deadline_ns = deadline_ns;
        batch.most_record_bytes = most_record_bytes;
        run_ = std::make_unique<BatchRun>(batch);
        if (!run_->refusal().empty()) throw std::invalid_argument(run_->refusal());
    }

    bool able() const { return run_->able(); }

    void run(std::size_t start, std::size_t stop) {
        if (!able()) throw std::invalid_argument("these copies are not for native code");
        if (start > stop || stop > count_) throw std::invalid_argument("there are no such records");
        const Kernels& here = kernels();
        nb::gil_scoped_release others_run;
        run_->run(here, start, stop);
    }

  private:
    Columns columns_;
    std::vector<Geometry> geometries_;
    std::size_t count_ = 0;
    std::unique_ptr<BatchRun> run_;
};

}  // namespace

void bind_copies(nb::module_& m) {
    nb::class_<Copies>(m, "Copies")
        .def(nb::init<bool, nb::object, const nb::tuple&, const nb::tuple&, const nb::tuple&, const nb::list&, nb::handle,
                      nb::handle, nb::handle, nb::handle, std::int64_t, std::size_t>(),
             nb::arg("load"), nb::arg("pages").none(), nb::arg("geometries"), nb::arg("items"), nb::arg("records"),
             nb::arg("coded"), nb::arg("identities"), nb::arg("status"), nb::arg("cancel"), nb::arg("dropped"),
             nb::arg("deadline_ns"), nb::arg("most_record_bytes"))
        .def_prop_ro("able", &Copies::able)
        .def("run", &Copies::run, nb::arg("start"), nb::arg("stop"));
}

}  // namespace kvc
