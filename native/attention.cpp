// The order of the work of a call: tasks, each some query tokens, some heads and one subtree of positions, which threads
// take one after the other. How the work is divided changes no bit, since results of cuts are merged along the tree wherever
// they were computed.
#include "attention.hpp"

#include <atomic>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>

#include "attention_task.hpp"

namespace kvc {
namespace {

constexpr std::size_t kTasksAThread = 4;

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

// The tasks, taken one after the other by as many threads as there are, and this one. False once the deadline has passed.
bool run_tasks(const Kernels& kernels, const AttentionCall& call, const std::vector<Task>& tasks) {
    std::atomic<std::size_t> next{0};
    std::mutex lock;
    std::exception_ptr failed;
    std::atomic<bool> late{false};
    const auto work = [&] {
        try {
            TaskRunner runner(kernels, call);
            for (std::size_t at = next++; at < tasks.size(); at = next++)
                if (!runner.run(tasks[at])) {
                    late = true;
                    next = tasks.size();  // the other threads see the deadline themselves, and take no more tasks
                }
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
    return !late;
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

bool attend(const Kernels& kernels, const AttentionCall& call) {
    const std::size_t rows = call.tokens * call.query_heads, width = call.value_dim;
    const Division division = divide_call(call);
    const std::size_t subtrees = division.stop - division.first;
    std::vector<float> out((subtrees - 1) * rows * width), lse((subtrees - 1) * rows);
    std::vector<Result> results{{call.out, call.lse}};
    for (std::size_t at = 0; at + 1 < subtrees; at++)
        results.push_back({out.data() + at * rows * width, lse.data() + at * rows});
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
    if (!run_tasks(kernels, call, tasks)) return false;
    merge_subtrees(*kernels.attention, results, division.first, rows, width);
    return true;
}

}  // namespace kvc
