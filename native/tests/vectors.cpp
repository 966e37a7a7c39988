// Checks every instruction set of this machine against a file of cases with their results, which tests/pages/vectors.py
// writes from the definitions in Python: `vectors FILE`. It needs no Python, so it also runs where none is built for, under
// an emulator. Bytes are read from and written to addresses of every alignment, and what lies beside them must stay.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "../attention.hpp"
#include "../copies.hpp"

namespace {

using u8 = std::uint8_t;
using u32 = std::uint32_t;
using u64 = std::uint64_t;
using Bytes = std::vector<u8>;

constexpr u8 kFill = 0xAA;

[[noreturn]] void fail(const std::string& what) {
    std::printf("FAILED: %s\n", what.c_str());
    std::exit(1);
}

void expect(bool holds, const std::string& what) {
    if (!holds) fail(what);
}

// The file: numbers of 64 bits, and bytes behind their number.
class Reader {
  public:
    explicit Reader(const char* path) {
        std::ifstream file(path, std::ios::binary);
        all_.assign(std::istreambuf_iterator<char>(file), {});
        expect(file.good() || file.eof(), "the file cannot be read");
    }
    bool more() const { return at_ < all_.size(); }
    u64 number() {
        u64 value;
        std::memcpy(&value, take(sizeof value), sizeof value);
        return value;
    }
    Bytes bytes() {
        const u64 count = number();
        const u8* const from = take(count);
        return Bytes(from, from + count);
    }
    std::vector<u64> numbers() {
        std::vector<u64> all(number());
        for (u64& each : all) each = number();
        return all;
    }

  private:
    const u8* take(u64 count) {
        expect(count <= all_.size() - at_, "the file ends within a case");
        at_ += count;
        return all_.data() + at_ - count;
    }

    Bytes all_;
    std::size_t at_ = 0;
};

// Bytes at an address that is a multiple of 64, and `skip` more, with a margin that must stay as it is.
class Room {
  public:
    Room(std::size_t nbytes, std::size_t skip) : all_(nbytes + skip + 192, kFill), nbytes_(nbytes) {
        start_ = 64 - reinterpret_cast<std::uintptr_t>(all_.data()) % 64 + skip;
    }
    Room(const Bytes& bytes, std::size_t skip) : Room(bytes.size(), skip) { std::memcpy(data(), bytes.data(), bytes.size()); }
    u8* data() { return all_.data() + start_; }
    void expect_is(const Bytes& bytes, const std::string& what) {
        expect(bytes.size() == nbytes_ && !std::memcmp(data(), bytes.data(), nbytes_), what + ": other bytes");
        for (std::size_t at = 0; at < all_.size(); at++)
            expect((at >= start_ && at < start_ + nbytes_) || all_[at] == kFill, what + ": bytes beside it were written");
    }

  private:
    Bytes all_;
    std::size_t nbytes_, start_;
};

constexpr std::size_t kSkips[] = {0, 1, 16, 32, 63};

void check_sums(Reader& reader, const kvc::Kernels& kernels, const std::string& name) {
    kvc::Layers layers{};
    layers.layers = reader.number();
    layers.layer_bytes = reader.number();
    layers.seed = reader.number();
    layers.seed_step = reader.number();
    const Bytes data = reader.bytes();
    const std::vector<u64> expected = reader.numbers();
    for (const std::size_t skip : kSkips) {
        Room from(data, skip);
        for (const auto copy : {kernels.copy_sums, kernels.stage_sums}) {
            std::vector<u64> sums(layers.layers), copied(layers.layers);
            kernels.sums(from.data(), layers, sums.data());
            expect(sums == expected, name + ": other sums");
            Room into(data.size(), 64 - skip);
            copy(into.data(), from.data(), layers, copied.data());
            expect(copied == expected, name + ": other sums of a copy");
            into.expect_is(data, name);
        }
    }
}

kvc::PlaneShape plane_of(Reader& reader) {
    kvc::PlaneShape plane{};
    plane.coding = static_cast<kvc::Coding>(reader.number());
    plane.number = static_cast<kvc::Number>(reader.number());
    plane.tokens = reader.number();
    plane.heads = reader.number();
    plane.dim = reader.number();
    plane.raw_bytes = reader.number();
    plane.coded_bytes = reader.number();
    return plane;
}

// A layer of any planes: what it is encoded as (nothing if it is refused), and what that is decoded to.
void check_layer(Reader& reader, const kvc::Kernels& kernels, const std::string& name) {
    kvc::LayerShape layer;
    for (u64 left = reader.number(); left; left--) layer.add(plane_of(reader));
    const Bytes raw = reader.bytes(), coded = reader.bytes(), decoded = reader.bytes();
    std::vector<float> scratch(layer.scratch);
    for (const std::size_t skip : kSkips) {
        Room from(raw, skip), into(layer.coded_bytes, 64 - skip);
        const bool accepted = kvc::encode_layer(*kernels.codecs, layer, from.data(), into.data(), scratch.data());
        expect(accepted == !coded.empty(), name + ": was " + (accepted ? "encoded" : "refused"));
        if (!accepted) continue;
        into.expect_is(coded, name + ", encoded");
        Room back(layer.raw_bytes, skip);
        kvc::decode_layer(*kernels.codecs, layer, into.data(), back.data(), scratch.data());
        back.expect_is(decoded, name + ", decoded");
    }
}

// Pages of all layers of some blocks, and memory that they are loaded into or stored from.
struct BatchCase {
    explicit BatchCase(Reader& reader) {
        layers = reader.number();
        heads = reader.number();
        fills = reader.numbers();
        codec = reader.number();
        for (u64 left = reader.number(); left; left--) coded.add(plane_of(reader));
        for (u64 left = reader.number(); left; left--) {
            const u64 tokens = reader.number(), elements = reader.number(), element_bytes = reader.number();
            planes.push_back({tokens, elements, element_bytes});
        }
        rows = reader.numbers();
        bases = reader.numbers();
        for (std::vector<std::int64_t>& column : strides)
            for (const u64 each : reader.numbers()) column.push_back(static_cast<std::int64_t>(each));
        identities = reader.numbers();
        sums = reader.numbers();
        pages = reader.bytes();
        before = reader.bytes();
        after = reader.bytes();
    }

    // Returns the status of each block, loaded from or stored to `page_bytes` into or from `memory`.
    Bytes run(const kvc::Kernels& kernels, bool load, u8* page_bytes, u8* memory, std::vector<u64>& sums_made) const {
        const std::size_t blocks = rows.size();
        std::vector<u64> addresses;
        for (const u64 base : bases) addresses.push_back(base + reinterpret_cast<std::uintptr_t>(memory));
        const kvc::Geometry geometry{0, layers, 0, heads, planes, rows.data(), blocks, addresses.data(), strides[0].data(),
                                     strides[1].data(), strides[2].data(), strides[3].data(),
                                     nullptr, false};  // a geometry's spans are checked where Python makes it
        std::vector<u32> numbers(blocks), first(blocks), last_layer(blocks, static_cast<u32>(layers)), starts(blocks);
        std::vector<u32> last_head(blocks, static_cast<u32>(heads)), fill_start(blocks, static_cast<u32>(fills[0]));
        std::vector<u32> fill_stop(blocks, static_cast<u32>(fills[1]));
        std::vector<u64> offsets(blocks), nbytes(blocks, pages.size() / blocks), codecs(blocks, codec);
        for (std::size_t block = 0; block < blocks; block++) {
            numbers[block] = static_cast<u32>(block);
            offsets[block] = block * nbytes[block];
            starts[block] = static_cast<u32>(block * layers);
        }
        Bytes status(blocks), dropped(blocks);
        const u32 cancel = 0;
        kvc::Batch batch{};
        batch.load = load;
        batch.pages = page_bytes;
        batch.page_bytes = pages.size();
        batch.geometries = {&geometry};
        batch.items = {blocks,       first.data(),     numbers.data(),    first.data(),    last_layer.data(),
                       first.data(), last_head.data(), fill_start.data(), fill_stop.data()};
        batch.records = {blocks,        numbers.data(), first.data(),  last_layer.data(), offsets.data(),
                         nbytes.data(), codecs.data(),  starts.data(), sums_made.data(),  sums_made.size()};
        if (codec != kvc::kRawCodec) batch.coded.push_back({codec, 0, heads, coded});
        batch.identities = identities.data();
        batch.status = status.data();
        batch.cancel = &cancel;
        batch.dropped = dropped.data();
        batch.deadline_ns = INT64_MAX;
        batch.most_record_bytes = pages.size();
        kvc::BatchRun run(batch);
        expect(run.refusal().empty() && run.able(), "a batch is refused: " + run.refusal());
        run.run(kernels, 0, blocks);
        return status;
    }

    std::size_t layers, heads;
    std::vector<u64> fills, rows, bases, identities, sums;
    u64 codec;
    kvc::LayerShape coded;
    std::vector<kvc::Plane> planes;
    std::vector<std::int64_t> strides[4];
    Bytes pages, before, after;
};

void check_batch(Reader& reader, const kvc::Kernels& kernels, const std::string& name) {
    const BatchCase one(reader);
    const Bytes done(one.rows.size(), kvc::kDone);
    for (const std::size_t skip : kSkips) {
        Room pages(one.pages, skip), memory(one.before, skip / 16 * 16);
        std::vector<u64> sums = one.sums;
        expect(one.run(kernels, true, pages.data(), memory.data(), sums) == done, name + ": was not loaded");
        memory.expect_is(one.after, name + ", loaded");
        pages.data()[skip] ^= 1;
        Bytes wrong = done;
        wrong[0] = kvc::kMismatch;
        expect(one.run(kernels, true, pages.data(), memory.data(), sums) == wrong, name + ": a wrong bit was not found");
        if (one.codec != kvc::kRawCodec || one.fills[0] || one.fills[1] != one.heads) continue;
        Room stored(one.pages.size(), skip), from(one.after, skip / 16 * 16);
        sums.assign(sums.size(), 0);
        expect(one.run(kernels, false, stored.data(), from.data(), sums) == done, name + ": was not stored");
        stored.expect_is(one.pages, name + ", stored");
        expect(sums == one.sums, name + ": stored with other sums");
    }
}

// One call: its results by plain arithmetic and by fused, and whichever of them the kernels have must be theirs to the bit.
void check_attention(Reader& reader, const kvc::Kernels& kernels, const std::string& name) {
    kvc::AttentionCall call{};
    call.number = static_cast<kvc::Number>(reader.number());
    for (std::size_t* each : {&call.block_tokens, &call.page_heads, &call.key_dim, &call.value_dim, &call.head_start,
                              &call.head_stop, &call.tokens, &call.query_heads, &call.level, &call.index})
        *each = reader.number();
    call.window = static_cast<std::int64_t>(reader.number());
    call.causal = reader.number();
    const Bytes shape = reader.bytes(), query = reader.bytes();
    std::memcpy(&call.shape, shape.data(), sizeof call.shape);
    for (u64 codecs = reader.number(); codecs; codecs--) {
        const auto codec = static_cast<std::int32_t>(reader.number());
        call.codecs.push_back({codec, kvc::LayerShape{}, reader.number()});
        for (u64 planes = reader.number(); planes; planes--) call.codecs.back().shape.add(plane_of(reader));
    }
    std::vector<Bytes> pages(reader.number());
    for (Bytes& page : pages) page = reader.bytes();
    const std::vector<u64> codecs = reader.numbers(), positions = reader.numbers();
    const std::vector<std::int32_t> kinds(codecs.begin(), codecs.end());
    const std::vector<std::int64_t> places(positions.begin(), positions.end());
    const std::vector<u64> spans = reader.numbers();  // of each: its first page, its pages, its position, its tokens
    const Bytes expected[2] = {reader.bytes(), reader.bytes()};
    std::vector<float> wanted(query.size() / sizeof(float));
    std::memcpy(wanted.data(), query.data(), query.size());
    for (const std::size_t skip : kSkips) {
        std::vector<Room> rooms;
        std::vector<std::int64_t> addresses;
        for (const Bytes& page : pages) rooms.emplace_back(page, skip);
        for (Room& room : rooms) addresses.push_back(reinterpret_cast<std::int64_t>(room.data()));
        call.spans.clear();
        call.row_spans.assign(1, {});
        for (std::size_t at = 0; at < spans.size(); at += 4) {
            call.row_spans[0].push_back(static_cast<u32>(call.spans.size()));
            call.spans.push_back({addresses.data() + spans[at], kinds.data() + spans[at], spans[at + 1],
                                  static_cast<std::int64_t>(spans[at + 2]), static_cast<std::int64_t>(spans[at + 3])});
        }
        call.starts = {0, call.tokens};
        const std::size_t rows = call.tokens * call.query_heads;
        Room made((call.value_dim + 1) * rows * sizeof(float), 64);
        call.query = wanted.data();
        call.positions = places.data();
        call.out = reinterpret_cast<float*>(made.data());
        call.lse = call.out + rows * call.value_dim;
        call.threads = 1 + skip % 3;
        kvc::attend(kernels, call);
        made.expect_is(expected[std::strcmp(kernels.name, "plain") != 0], name);
    }
}

}  // namespace

int main(int count, char** arguments) {
    expect(count == 2, "usage: vectors FILE");
    for (const kvc::Kernels* kernels : kvc::kernels_here()) {
        Reader reader(arguments[1]);
        std::size_t cases = 0;
        for (; reader.more(); cases++) {
            const u64 kind = reader.number();
            const Bytes text = reader.bytes();
            const std::string name = std::string(kernels->name) + ": " + std::string(text.begin(), text.end());
            using Check = void (*)(Reader&, const kvc::Kernels&, const std::string&);
            constexpr Check kChecks[] = {check_sums, check_layer, check_batch, check_attention};
            expect(kind < 4, name + ": no such kind of case");
            kChecks[kind](reader, *kernels, name);
        }
        expect(cases > 0, "the file is empty");
        std::printf("%s: %zu cases\n", kernels->name, cases);
    }
}
