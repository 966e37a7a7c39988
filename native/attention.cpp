// The order of the work of a call: tasks, each some query tokens, some heads and one subtree of positions, which threads
// take one after the other; within a task the cuts of its subtree, and within a cut the pages. How the work is divided
// changes no bit, since results of cuts are merged along the tree wherever they were computed.
#include "attention.hpp"

#include <algorithm>
#include <atomic>
#include <exception>
#include <limits>
#include <mutex>
#include <system_error>
#include <thread>

#include "kernels.hpp"

namespace kvc {
namespace {

using u8 = std::uint8_t;
using i64 = std::int64_t;

constexpr std::size_t kQueriesAtOnce = 128;  // their scores for a cut are 256 KiB, and stay in a cache
constexpr std::size_t kTokensAtOnce = 64;    // keys that are widened before they are used
constexpr std::size_t kSlackRows = kSumLanes;  // behind keys, which are read in whole tiles
constexpr std::size_t kTasksAThread = 4, kMostLevels = 31;

std::size_t padded(std::size_t dim) { return (dim + kSumLanes - 1) / kSumLanes * kSumLanes; }

// Queries, from the block's first, that name a span.
struct Readers {
    std::size_t start, stop;
};

struct Segment {
    const PageSpan* span;
    std::vector<Readers> readers;  // apart and in order
};

// Query tokens that are worked on together, and the spans that they name, in the order of their positions.
struct Block {
    std::size_t first, stop;  // tokens
    i64 seen_start, seen_stop;  // positions that any of them sees
    std::vector<Segment> segments;
};

struct Bounds {
    i64 start, stop;
};

Bounds bounds_of(const AttentionCall& call, std::size_t token) {
    const i64 from = static_cast<i64>(call.index * kCutTokens << call.level);
    const i64 to = static_cast<i64>((call.index + 1) * kCutTokens << call.level);
    const i64 last = call.causal ? call.positions[token] + 1 : to;
    const i64 first = call.window ? last - call.window : 0;
    return {std::clamp(first, from, to), std::clamp(last, from, to)};
}

std::vector<Block> blocks_of(const AttentionCall& call) {
    const std::size_t group = call.group(), most = std::max<std::size_t>(1, kQueriesAtOnce / group);
    std::vector<Block> blocks;
    std::size_t row = 0;
    for (std::size_t first = 0; first < call.tokens; first += most) {
        Block block{};
        block.first = first;
        block.stop = std::min(first + most, call.tokens);
        block.seen_start = std::numeric_limits<i64>::max();
        std::vector<std::size_t> segment_of(call.spans.size(), SIZE_MAX);
        while (call.starts[row + 1] <= first) row++;
        for (std::size_t token = first, of = row; token < block.stop; token++) {
            const Bounds seen = bounds_of(call, token);
            if (seen.start < seen.stop) {
                block.seen_start = std::min(block.seen_start, seen.start);
                block.seen_stop = std::max(block.seen_stop, seen.stop);
            }
            while (call.starts[of + 1] <= token) of++;
            const std::size_t query = (token - first) * group;
            for (const std::uint32_t span : call.row_spans[of]) {
                if (segment_of[span] == SIZE_MAX) {
                    segment_of[span] = block.segments.size();
                    block.segments.push_back({&call.spans[span], {}});
                }
                std::vector<Readers>& readers = block.segments[segment_of[span]].readers;
                if (!readers.empty() && readers.back().stop == query)
                    readers.back().stop += group;
                else
                    readers.push_back({query, query + group});
            }
        }
        std::stable_sort(block.segments.begin(), block.segments.end(), [](const Segment& a, const Segment& b) {
            return a.span->position < b.span->position;
        });
        blocks.push_back(std::move(block));
    }
    return blocks;
}

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
class Worker {
  public:
    Worker(const Kernels& kernels, const AttentionCall& call) : all_(kernels), kernels_(*kernels.attention), call_(call) {}

    void run(const Task& task) {
        task_ = &task;
        group_ = call_.group();
        queries_ = (task.block->stop - task.block->first) * group_;
        heads_ = task.head_stop - task.head;
        take_queries();
        Heads& result = result_of(task.level + 1);
        if (subtree(task.level, task.index, result)) put(result);
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
                const std::size_t row = token * call_.query_heads + (task_->head + head - call_.head_start) * group_ + at % group_;
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
        if (!sees(start, stop)) return false;
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
                const std::size_t count = std::min({call_.block_tokens - token, static_cast<std::size_t>(last - at), kTokensAtOnce});
                const auto found = std::find_if(call_.codecs.begin(), call_.codecs.end(),
                                                [&](const auto& each) { return each.first == span.codecs[page]; });
                pieces_.push_back({&segment, reinterpret_cast<const u8*>(span.addresses[page]), &found->second, token, count,
                                   static_cast<std::size_t>(at - base), page == before});
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

    static const u8* start_of(const Piece& piece, std::size_t which) {
        return which && piece.shape->planes.size() > 1 ? piece.layer + piece.shape->planes[0].coded_bytes : piece.layer;
    }

    const Kernels& all_;
    const AttentionKernels& kernels_;
    const AttentionCall& call_;
    const Task* task_ = nullptr;
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

// How the call is divided: into blocks of query tokens, into ranges of heads, and into subtrees of `level`.
struct Division {
    std::vector<Block> blocks;
    std::size_t heads, level, first, stop;  // the subtrees' indices
};

// At least kTasksAThread tasks for each thread, as far as cuts and heads go round. One thread gets whole trees.
Division divide_call(const AttentionCall& call) {
    Division division{blocks_of(call), 1, call.level, call.index, call.index + 1};
    const std::size_t all = call.head_stop - call.head_start;
    std::size_t queries = 1;
    i64 start = std::numeric_limits<i64>::max(), stop = 0;
    for (const Block& block : division.blocks) {
        queries = std::max(queries, (block.stop - block.first) * call.group());
        for (const Segment& segment : block.segments) {
            start = std::min(start, std::max(segment.span->position, block.seen_start));
            stop = std::max(stop, std::min(segment.span->stop(), block.seen_stop));
        }
    }
    division.heads = std::clamp<std::size_t>(2 * kQueriesAtOnce / queries, 1, all);
    const std::size_t wanted = call.threads > 1 ? kTasksAThread * call.threads : 1;
    const auto tasks = [&] {
        return division.blocks.size() * ((all + division.heads - 1) / division.heads) * (division.stop - division.first);
    };
    while (start < stop && tasks() < wanted && division.level > 0) {
        division.level--;
        division.first = static_cast<std::size_t>(start) / kCutTokens >> division.level;
        division.stop = (static_cast<std::size_t>(stop - 1) / kCutTokens >> division.level) + 1;
    }
    while (tasks() < wanted && division.heads > 1) division.heads = (division.heads + 1) / 2;
    return division;
}

// The tasks, taken one after the other by as many threads as there are, and this one.
void run_tasks(const Kernels& kernels, const AttentionCall& call, const std::vector<Task>& tasks) {
    std::atomic<std::size_t> next{0};
    std::mutex lock;
    std::exception_ptr failed;
    const auto work = [&] {
        try {
            Worker worker(kernels, call);
            for (std::size_t at = next++; at < tasks.size(); at = next++) worker.run(tasks[at]);
        } catch (...) {
            const std::lock_guard<std::mutex> held(lock);
            failed = std::current_exception();
        }
    };
    std::vector<std::thread> others;
    try {
        while (others.size() + 1 < std::min(call.threads, tasks.size())) others.emplace_back(work);
    } catch (const std::system_error&) {  // fewer threads, then
    }
    work();
    for (std::thread& other : others) other.join();
    if (failed) std::rethrow_exception(failed);
}

// The result of a subtree, of the whole call's shape.
struct Result {
    float *out, *lse;
};

// Merges the results of neighbouring subtrees, of which the first has the index `first`, into the first of them.
void merge_subtrees(const AttentionKernels& kernels, std::vector<Result> results, std::size_t first, std::size_t rows,
                    std::size_t width) {
    for (; results.size() > 1; first /= 2) {
        std::vector<Result> parents;
        for (std::size_t at = 0; at < results.size(); at++) {
            if (at && (first + at) % 2)
                kernels.merge(parents.back().out, parents.back().lse, results[at].out, results[at].lse, rows, width);
            else
                parents.push_back(results[at]);
        }
        results = std::move(parents);
    }
}

}  // namespace

void attend(const Kernels& kernels, const AttentionCall& call) {
    const std::size_t rows = call.tokens * call.query_heads, width = call.value_dim;
    const Division division = divide_call(call);
    const std::size_t subtrees = division.stop - division.first;
    std::vector<float> out((subtrees - 1) * rows * width), lse((subtrees - 1) * rows);
    std::vector<Result> results{{call.out, call.lse}};
    for (std::size_t at = 0; at + 1 < subtrees; at++) results.push_back({out.data() + at * rows * width, lse.data() + at * rows});
    for (const Result& result : results) {
        std::fill_n(result.out, rows * width, 0.0f);
        std::fill_n(result.lse, rows, -std::numeric_limits<float>::infinity());
    }
    std::vector<Task> tasks;
    for (std::size_t at = 0; at < subtrees; at++)
        for (const Block& block : division.blocks)
            for (std::size_t head = call.head_start; head < call.head_stop; head += division.heads)
                tasks.push_back({&block, head, std::min(head + division.heads, call.head_stop), division.level,
                                 division.first + at, results[at].out, results[at].lse});
    run_tasks(kernels, call, tasks);
    merge_subtrees(*kernels.attention, results, division.first, rows, width);
}

}  // namespace kvc
