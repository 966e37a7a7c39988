// Tasks, and what carries them out: for each cut of a task's subtree the scores of its pages, the weights, and the sums of
// values; then merges along the tree. Included by attention.cpp alone.
#pragma once

#include <time.h>

#include "attention_blocks.hpp"
#include "kernels.hpp"

namespace kvc {

constexpr std::size_t kTokensAtOnce = 64;      // keys that are widened before they are used
constexpr std::size_t kSlackRows = kSumLanes;  // behind keys, which are read in whole tiles
constexpr std::size_t kMostLevels = 31;        // of the tree

inline std::size_t padded(std::size_t dim) { return (dim + kSumLanes - 1) / kSumLanes * kSumLanes; }

// Some tokens of one page within a cut.
struct Piece {
    const Segment* segment;
    const u8* layer;
    const LayerShape* shape;
    std::size_t token, count;  // within the page
    std::size_t at;            // within the cut
    bool same_page;            // as the piece before, which was as long as a run
};

// Pieces of one segment whose positions follow one another, together at most kTokensAtOnce. They are widened together.
struct Run {
    std::size_t first, stop;  // pieces
    std::size_t count;        // tokens
};

// Floats at an address that is a multiple of a cache line, so that no register is loaded from two.
class AlignedFloats {
  public:
    void resize(std::size_t count) {
        if (count > room_) {
            memory_.assign(count + kLine, 0);
            room_ = count;
        }
        count_ = count;
    }
    float* data() {
        const std::uintptr_t address = reinterpret_cast<std::uintptr_t>(memory_.data()) / sizeof(float);
        return memory_.data() + (kLine - address % kLine) % kLine;
    }
    void fill(float value) { std::fill_n(data(), count_, value); }

  private:
    static constexpr std::size_t kLine = 64 / sizeof(float);
    std::vector<float> memory_;
    std::size_t count_ = 0, room_ = 0;
};

// A part of the call: the heads `head` to `head_stop` of the pages, and one subtree.
struct Task {
    const Block* block;
    std::size_t head, head_stop;
    std::size_t level, index;
    float *out, *lse;  // of the whole call's shape
};

// What one thread works with. Results of the task's queries have rows of padded(value_dim), head by head.
class TaskRunner {
  public:
    TaskRunner(const Kernels& kernels, const AttentionCall& call) : all_(kernels), kernels_(*kernels.attention), call_(call) {}

    // False if the deadline passed meanwhile: there is no result then, and there are none of later tasks.
    bool run(const Task& task) {
        task_ = &task;
        group_ = call_.group();
        queries_ = (task.block->stop - task.block->first) * group_;
        heads_ = task.head_stop - task.head;
        take_queries();
        Heads& result = result_of(task.level + 1);
        if (subtree(task.level, task.index, result) && !late_) put(result);
        return !late_;
    }

  private:
    struct Heads {
        AlignedFloats out;
        std::vector<float> lse;
    };

    std::size_t key_width() const { return padded(call_.key_dim); }
    std::size_t value_width() const { return padded(call_.value_dim); }
    FloatRows out_of(Heads& result, std::size_t head) const {
        return {result.out.data() + head * queries_ * value_width(), value_width()};
    }

    Heads& result_of(std::size_t level) {
        Heads& result = results_[level];
        result.out.resize(heads_ * queries_ * value_width());
        result.lse.resize(heads_ * queries_);
        return result;
    }

    void take_queries() {
        const std::size_t width = key_width();
        query_.resize(heads_ * queries_ * width);
        query_.fill(0);
        for (std::size_t head = 0; head < heads_; head++)
            for (std::size_t at = 0; at < queries_; at++) {
                const std::size_t token = task_->block->first + at / group_;
                const std::size_t from = (task_->head + head - call_.head_start) * group_ + at % group_;
                const float* const row = call_.query + (token * call_.query_heads + from) * call_.key_dim;
                std::copy(row, row + call_.key_dim, query_.data() + (head * queries_ + at) * width);
            }
        scores_.resize(heads_ * queries_ * kCutTokens);
        totals_.resize(heads_ * queries_);
        seen_.resize(queries_);
        rows_.resize((kTokensAtOnce + kSlackRows) * std::max(width, value_width()));
    }

    void put(Heads& result) {
        for (std::size_t head = 0; head < heads_; head++)
            for (std::size_t at = 0; at < queries_; at++) {
                const std::size_t token = task_->block->first + at / group_;
                const std::size_t of = (task_->head + head - call_.head_start) * group_ + at % group_;
                const std::size_t row = token * call_.query_heads + of;
                const float* const from = out_of(result, head).row(at);
                std::copy(from, from + call_.value_dim, task_->out + row * call_.value_dim);
                task_->lse[row] = result.lse[head * queries_ + at];
            }
    }

    // False if the task's queries see no position of it. `into` is undefined then. A task's right-hand results lie at
    // their level, so `result_of(level)` is free for it here.
    bool subtree(std::size_t level, std::size_t index, Heads& into) {
        const i64 start = static_cast<i64>(index * kCutTokens << level);
        const i64 stop = static_cast<i64>((index + 1) * kCutTokens << level);
        if (late_ || !sees(start, stop)) return false;
        if (!level) return cut(start, into);
        const bool left = subtree(level - 1, 2 * index, into);
        if (!left) return subtree(level - 1, 2 * index + 1, into);
        if (!sees(start + (stop - start) / 2, stop)) return true;
        const std::size_t rows = heads_ * queries_;
        result_of(level);
        if (subtree(level - 1, 2 * index + 1, results_[level]))
            kernels_.merge(into.out.data(), into.lse.data(), results_[level].out.data(), results_[level].lse.data(), rows,
                           value_width());
        return true;
    }

    bool sees(i64 start, i64 stop) const {
        start = std::max(start, task_->block->seen_start);
        stop = std::min(stop, task_->block->seen_stop);
        for (const Segment& segment : task_->block->segments)
            if (std::max(start, segment.span->position) < std::min(stop, segment.span->stop())) return true;
        return false;
    }

    void find_pieces(i64 base) {
        pieces_.clear();
        runs_.clear();
        const i64 start = std::max(base, task_->block->seen_start);
        const i64 stop = std::min(base + static_cast<i64>(kCutTokens), task_->block->seen_stop);
        for (const Segment& segment : task_->block->segments) {
            const PageSpan& span = *segment.span;
            const i64 last = std::min(stop, span.stop());
            std::size_t before = SIZE_MAX;
            for (i64 at = std::max(start, span.position); at < last;) {
                const std::size_t page = static_cast<std::size_t>(at - span.position) / call_.block_tokens;
                const std::size_t token = static_cast<std::size_t>(at - span.position) % call_.block_tokens;
                const std::size_t rest = static_cast<std::size_t>(last - at);
                const std::size_t count = std::min({call_.block_tokens - token, rest, kTokensAtOnce});
                const auto found = std::find_if(call_.codecs.begin(), call_.codecs.end(),
                                                [&](const CodedLayer& each) { return each.codec == span.codecs[page]; });
                const u8* const layer = reinterpret_cast<const u8*>(span.addresses[page]) + found->offset;
                pieces_.push_back({&segment, layer, &found->shape, token, count, static_cast<std::size_t>(at - base),
                                   page == before});
                before = page;
                at += static_cast<i64>(count);
                const bool joins = !runs_.empty() && pieces_[runs_.back().first].segment == &segment &&
                                   runs_.back().count + count <= kTokensAtOnce;
                if (!joins) runs_.push_back({pieces_.size() - 1, pieces_.size() - 1, 0});
                runs_.back().stop++;
                runs_.back().count += count;
            }
        }
    }

    // The keys and values of one cut. Every query of the block gets a result.
    bool cut(i64 base, Heads& into) {
        late_ = call_.deadline_ns && now_ns() >= call_.deadline_ns;
        if (late_) return false;
        find_pieces(base);
        for (std::size_t at = 0; at < queries_; at++) {
            const Bounds seen = bounds_of(call_, task_->block->first + at / group_);
            const i64 stop = base + static_cast<i64>(kCutTokens);
            seen_[at].first = static_cast<std::uint32_t>(std::clamp(seen.start, base, stop) - base);
            seen_[at].stop = static_cast<std::uint32_t>(std::clamp(seen.stop, base, stop) - base);
        }
        scores_.fill(-std::numeric_limits<float>::infinity());
        each_run(0, [&](std::size_t at, std::size_t count, std::size_t head, const Readers& readers) {
            const FloatRows query{query_.data() + head * queries_ * key_width(), key_width()};
            kernels_.scores({query.row(readers.start), query.width}, readers.stop - readers.start, {rows_.data(), query.width},
                            count, call_.shape, scores_of(head, readers.start) + at);
        });
        for (std::size_t at = 0; at < heads_ * queries_; at++) {
            const Seen seen = seen_[at % queries_];
            totals_[at] = 1;
            into.lse[at] = -std::numeric_limits<float>::infinity();
            if (seen.first < seen.stop) into.lse[at] = kernels_.weigh(scores_.data() + at * kCutTokens, seen, &totals_[at]);
        }
        into.out.fill(0);
        each_run(1, [&](std::size_t at, std::size_t count, std::size_t head, const Readers& readers) {
            const FloatRows out = out_of(into, head);
            kernels_.add_values(scores_of(head, readers.start), seen_.data() + readers.start, readers.stop - readers.start,
                                {rows_.data(), out.width}, at, count, {out.row(readers.start), out.width});
        });
        for (std::size_t at = 0; at < heads_ * queries_; at++)
            kernels_.divide(into.out.data() + at * value_width(), value_width(), totals_[at]);
        return true;
    }

    float* scores_of(std::size_t head, std::size_t query) { return scores_.data() + (head * queries_ + query) * kCutTokens; }

    // For each run and head: widens its keys (0) or values (1) to `rows_`, and calls `use` for all that read them.
    template <typename Use>
    void each_run(std::size_t which, const Use& use) {
        const std::size_t dim = which ? call_.value_dim : call_.key_dim, width = padded(dim);
        const std::size_t page = page_bytes();
        for (const Run& run : runs_) {
            planes_.clear();
            if (decoded_.size() < (run.stop - run.first) * page) decoded_.resize((run.stop - run.first) * page);
            for (std::size_t at = run.first; at < run.stop; at++) planes_.push_back(plane_of(at, which, at - run.first));
            for (std::size_t head = 0; head < heads_; head++) {
                float* into = rows_.data();
                for (std::size_t at = run.first; at < run.stop; at++) {
                    const PlaneBytes& from = planes_[at - run.first];
                    kernels_.widen(call_.number, from.base + static_cast<std::ptrdiff_t>(head) * from.head_stride,
                                   from.token_stride, pieces_[at].count, dim, from.ahead, {into, width});
                    into += pieces_[at].count * width;
                }
                for (const Readers& readers : pieces_[run.first].segment->readers)
                    use(pieces_[run.first].at, run.count, head, readers);
            }
        }
    }

    // The piece's first token and the task's first head.
    struct PlaneBytes {
        const u8* base;
        std::ptrdiff_t token_stride, head_stride, ahead;
    };

    // Of a decoded plane of the task's heads, the larger of the two.
    std::size_t page_bytes() const {
        const std::size_t wide = call_.number == Number::kFloat32 ? 4 : 2;
        return call_.block_tokens * heads_ * std::max(call_.key_dim, call_.value_dim) * wide;
    }

    // Decodes the page if it is encoded, to the given slot of `decoded_`. What is read a run later is prefetched.
    PlaneBytes plane_of(std::size_t at, std::size_t which, std::size_t slot) {
        const Piece& piece = pieces_[at];
        const std::size_t number = std::min(which, piece.shape->planes.size() - 1);
        const PlaneShape& plane = piece.shape->planes[number];
        const std::size_t dim = plane.raw_bytes / call_.block_tokens / call_.page_heads;
        const std::size_t raw_token = dim * call_.page_heads, token = dim * heads_;
        const u8* const coded = start_of(piece, which);
        const u8* const ahead = ahead_of(at, which);
        if (plane.coding == Coding::kRaw) {
            const u8* const base = coded + piece.token * raw_token + task_->head * dim;
            return {base, static_cast<std::ptrdiff_t>(raw_token), static_cast<std::ptrdiff_t>(dim), ahead ? ahead - coded : 0};
        }
        u8* const decoded = decoded_.data() + slot * token * call_.block_tokens;
        if (!piece.same_page) {
            scratch_.resize(std::max(scratch_.size(), piece.shape->scratch));
            PlaneRows rows{};
            rows.base = decoded;
            rows.token_stride = static_cast<std::ptrdiff_t>(token);
            rows.head_stride = static_cast<std::ptrdiff_t>(dim);
            rows.head_start = task_->head;
            rows.head_stop = task_->head_stop;
            rows.ahead = ahead;
            all_.codecs->decode(plane, coded, rows, scratch_.data());
        }
        return {decoded + piece.token * token, static_cast<std::ptrdiff_t>(token), static_cast<std::ptrdiff_t>(dim), 0};
    }

    // The plane that is read kTokensAtOnce tokens later: of these pieces, or after the last keys the first values.
    const u8* ahead_of(std::size_t at, std::size_t which) const {
        const std::size_t next = at + std::max<std::size_t>(1, kTokensAtOnce / call_.block_tokens);
        if (next < pieces_.size()) return start_of(pieces_[next], which);
        return which || next - pieces_.size() >= pieces_.size() ? nullptr : start_of(pieces_[next - pieces_.size()], 1);
    }

    static i64 now_ns() {
        timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        return static_cast<i64>(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
    }

    static const u8* start_of(const Piece& piece, std::size_t which) {
        return which && piece.shape->planes.size() > 1 ? piece.layer + piece.shape->planes[0].coded_bytes : piece.layer;
    }

    const Kernels& all_;
    const AttentionKernels& kernels_;
    const AttentionCall& call_;
    const Task* task_ = nullptr;
    bool late_ = false;  // the deadline has passed
    std::size_t group_ = 0, queries_ = 0, heads_ = 0;
    AlignedFloats query_, scores_, rows_;
    std::vector<float> totals_, scratch_;
    std::vector<Seen> seen_;
    std::vector<Piece> pieces_;
    std::vector<Run> runs_;
    std::vector<PlaneBytes> planes_;
    std::vector<u8> decoded_;
    std::vector<Heads> results_{std::vector<Heads>(kMostLevels + 2)};  // never resized: references stay valid
};

}  // namespace kvc
