// A functional emulation of the part of Ascend C that rewy's kernels use, for g++ on an ordinary machine.
//
// It is written from the public API documentation alone (CANN 9.1 "asc-devkit", docs/zh/api); "doc:" names the
// page each call follows, below SIMD-API/基础API unless another folder is named. It is no NPU and no simulator:
// it has no clock and its instructions run one at a time in program order. What it checks on the way:
//
//   capacity    every tensor lies inside its buffer; buffers have the sizes of an Ascend 950 core
//   alignment   the 32, 64, 512 and 1024 byte rules and the value ranges of each page
//   contents    no instruction reads bytes that nothing has written in this launch
//   order       two instructions that touch the same bytes, one of them writing, must be ordered by flags,
//               barriers or being on one in-order pipe. This is decided by vector clocks, not by luck: a missing
//               wait is found although everything here runs in order
//   flags       set once before each wait, none left over; cross-core counters stay within 15 and end at 0;
//               a wait that nothing can end is reported, not waited for
//
// One block of a __mix__(1, 2) kernel is three threads: a cube core (AIC) and two vector cores (AIV). A cross-core
// wait stops the whole emulated core, where the chip stops one pipe; so a kernel must not set, after a wait in
// program order, what that wait needs. The same holds for SetFlag and WaitFlag.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "../fake/log.h"

#define __aicore__
#define __global__
#define __gm__
#define __mix__(cube, vector)
#define GM_ADDR uint8_t *
#define ASCEND_IS_AIC (::emulation::core().kind == ::emulation::Kind::AIC)
#define ASCEND_IS_AIV (::emulation::core().kind == ::emulation::Kind::AIV)

// doc: 数据结构/内置数据类型
struct half {
    _Float16 bits;
    half() = default;
    explicit half(float x) : bits(static_cast<_Float16>(x)) {}
    explicit operator float() const { return static_cast<float>(bits); }
};
struct bfloat16_t {
    uint16_t bits;
    bfloat16_t() = default;
    explicit bfloat16_t(float x)  // to nearest, ties to even
    {
        uint32_t u;
        std::memcpy(&u, &x, 4);
        bits = std::isnan(x) ? 0x7FC0 : static_cast<uint16_t>((u + 0x7FFF + ((u >> 16) & 1)) >> 16);
    }
    explicit operator float() const
    {
        const uint32_t u = static_cast<uint32_t>(bits) << 16;
        float x;
        std::memcpy(&x, &u, 4);
        return x;
    }
};

// doc: 同步控制/核内同步/核内同步能力概述
enum pipe_t { PIPE_S, PIPE_V, PIPE_M, PIPE_MTE1, PIPE_MTE2, PIPE_MTE3, PIPE_FIX, PIPE_ALL };
enum event_t { EVENT_ID0, EVENT_ID1, EVENT_ID2, EVENT_ID3, EVENT_ID4, EVENT_ID5, EVENT_ID6, EVENT_ID7 };

// doc: 矩阵计算（ISASI）/矩阵计算的搬出/Fixpipe（L0C到UB数据搬运）
enum QuantMode_t { NoQuant, F322F16, F322BF16 };

namespace emulation {

// Where a call stands.
struct Place {
    const char *file;
    int line;
    static constexpr Place current(const char *file = __builtin_FILE(), int line = __builtin_LINE())
    {
        return {file, line};
    }
};

constexpr int kPipes = 7;
constexpr int kCores = 3;  // AIC, AIV 0, AIV 1
constexpr int kLanes = kPipes * kCores;
constexpr size_t kLine = 32;  // bytes that share one record of who touched them

enum class Kind { AIC, AIV };
enum class Memory { L1, L0A, L0B, L0C, UB0, UB1 };
constexpr int kMemories = 6;
constexpr std::array<const char *, kMemories> kMemoryName{"L1", "L0A", "L0B", "L0C", "UB of AIV 0", "UB of AIV 1"};
constexpr std::array<size_t, kMemories> kMemorySize{512 << 10, 64 << 10, 64 << 10, 256 << 10, 248 << 10, 248 << 10};
constexpr std::array<const char *, kPipes> kPipeName{"S", "V", "M", "MTE1", "MTE2", "MTE3", "FIX"};
constexpr int kCounterMax = 15;  // doc: 同步控制/核间同步/CrossCoreSetFlag(ISASI)
constexpr int kCrossFlags = 16;
constexpr int kEvents = 8;  // doc: 同步控制/核内同步/SetFlag-WaitFlag(ISASI)

struct Failure : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// A point in time as each pipe of the block sees it: how many instructions of every lane are known to be over.
using Clock = std::array<uint32_t, kLanes>;

inline void merge(Clock &into, const Clock &from)
{
    for (int i = 0; i < kLanes; ++i) into[i] = std::max(into[i], from[i]);
}

struct Stamp {
    int lane = -1;
    uint32_t epoch = 0;
    Place place = Place::current();
};

struct Line {
    Stamp write;
    std::vector<Stamp> reads;  // at most one a lane, since the last write
};

struct Flag {
    bool set = false;
    Clock clock{};
    Place place = Place::current();
};

struct Core {
    Kind kind;
    int sub;  // which vector core
    int index;
    std::array<Clock, kPipes> view{};  // what each pipe knows to be over
    std::array<uint32_t, kPipes> count{};
    std::array<std::array<std::array<Flag, kEvents>, kPipes>, kPipes> flags{};
    std::array<std::deque<Clock>, kCrossFlags> arrived{};  // cross-core flags that this core may consume
    int waits_for = -1;                                    // the flag that this core is stopped at
    bool ended = false;
    bool stuck() const { return ended || (waits_for >= 0 && arrived[waits_for].empty()); }
    std::string name() const { return kind == Kind::AIC ? "AIC" : "AIV " + std::to_string(sub); }
};

// One AI core: its memories, and the record of who touched what.
struct Block {
    std::array<std::vector<uint8_t>, kMemories> bytes;
    std::array<std::vector<Line>, kMemories> lines;
    std::array<Core, kCores> cores{Core{Kind::AIC, 0, 0}, Core{Kind::AIV, 0, 1}, Core{Kind::AIV, 1, 2}};
    std::array<std::array<std::deque<Clock>, 2>, kCrossFlags> half_set;  // set by one vector core, not yet by both
    std::mutex mutex;
    std::condition_variable changed;
    std::string failure;  // the first one; it ends every core of the block
    int64_t index = 0, count = 1;

    Block()
    {
        for (int m = 0; m < kMemories; ++m) {
            bytes[m].assign(kMemorySize[m], 0xFF);  // NaN in every float type
            lines[m].resize(kMemorySize[m] / kLine);
        }
    }
};

inline thread_local Block *t_block = nullptr;
inline thread_local Core *t_core = nullptr;

inline Core &core()
{
    if (t_core == nullptr) throw Failure("emulation: no kernel is running");
    return *t_core;
}
inline Block &block() { return *t_block; }

inline std::string where(const Place &p)
{
    const std::string file = p.file;
    return file.substr(file.find_last_of('/') + 1) + ":" + std::to_string(p.line);
}

template <class... Parts>
[[noreturn]] void fail(const Place &place, const Parts &...parts)
{
    std::ostringstream text;
    text << where(place) << ": " << (t_core != nullptr ? core().name() + ": " : "");
    (text << ... << parts);
    throw Failure(text.str());
}

template <class... Parts>
void require(bool ok, const Place &place, const Parts &...parts)
{
    if (!ok) fail(place, parts...);
}

inline int lane_of(const Core &c, int pipe) { return c.index * kPipes + pipe; }
inline std::string lane_name(int lane)
{
    static const char *cores[] = {"AIC", "AIV 0", "AIV 1"};
    return std::string(cores[lane / kPipes]) + " " + kPipeName[lane % kPipes];
}

// The ends of what instructions have touched so far, in bytes.
inline std::array<size_t, kMemories> touched{};

// One instruction on a pipe of the running core, holding the block while it runs.
class Instruction {
public:
    Instruction(const char *name, pipe_t pipe, const Place &place) : name_(name), place_(place), lock_(block().mutex)
    {
        Core &c = core();
        if (!block().failure.empty()) throw Failure(block().failure);
        // The scalar unit issues everything, so what it has waited for is over for every later instruction.
        Clock issued = c.view[PIPE_S];
        issued[lane_of(c, PIPE_S)] = c.view[pipe][lane_of(c, PIPE_S)];
        merge(c.view[pipe], issued);
        view_ = &c.view[pipe];
        lane_ = lane_of(c, pipe);
        // Vector instructions are ordered by the compiler's own PIPE_V barriers, scalar ones by the hardware
        // (doc: 同步控制/核内同步/PipeBarrier(ISASI)); the other pipes start the next before the last one ends.
        if (pipe == PIPE_V || pipe == PIPE_S) (*view_)[lane_] = c.count[pipe];
        epoch_ = ++c.count[pipe];
    }

    const uint8_t *read(Memory memory, size_t offset, size_t size)
    {
        for (Line &line : span(memory, offset, size)) {
            if (line.write.lane < 0) {
                fail(place_, name_, " reads bytes ", offset, "..", offset + size, " of ", kMemoryName[int(memory)],
                     " that nothing has written");
            }
            check(line.write, "written", memory, offset);
            const Stamp now{lane_, epoch_, place_};
            auto mine = std::find_if(line.reads.begin(), line.reads.end(),
                                     [&](const Stamp &r) { return r.lane == lane_; });
            if (mine == line.reads.end()) {
                line.reads.push_back(now);
            } else {
                *mine = now;
            }
        }
        return &block().bytes[int(memory)][offset];
    }

    // `forwarded`: the hardware itself orders this with an earlier instruction of the same pipe.
    uint8_t *write(Memory memory, size_t offset, size_t size, bool forwarded = false)
    {
        for (Line &line : span(memory, offset, size)) {
            if (!(forwarded && line.write.lane == lane_)) check(line.write, "written", memory, offset);
            for (const Stamp &r : line.reads) {
                if (!(forwarded && r.lane == lane_)) check(r, "read", memory, offset);
            }
            line.reads.clear();
            line.write = {lane_, epoch_, place_};
        }
        written_ += size;
        return &block().bytes[int(memory)][offset];
    }

    Instruction(const Instruction &) = delete;
    ~Instruction();

    // How many instructions of another pipe of this core, issued before, may still run beside this one.
    uint32_t beside(pipe_t pipe) const { return core().count[pipe] - (*view_)[lane_of(core(), pipe)]; }

    const Place &place() const { return place_; }
    const char *name() const { return name_; }

private:
    struct Span {
        Line *first, *last;
        Line *begin() const { return first; }
        Line *end() const { return last; }
    };

    Span span(Memory memory, size_t offset, size_t size)
    {
        require(offset + size <= kMemorySize[int(memory)], place_, name_, " touches bytes ", offset, "..",
                offset + size, " of ", kMemoryName[int(memory)], ", which has ", kMemorySize[int(memory)]);
        touched[int(memory)] = std::max(touched[int(memory)], offset + size);
        Line *lines = block().lines[int(memory)].data();
        return {lines + offset / kLine, lines + (offset + size + kLine - 1) / kLine};
    }

    void check(const Stamp &other, const char *what, Memory memory, size_t offset) const
    {
        const bool itself = other.lane == lane_ && other.epoch == epoch_;
        if (other.lane < 0 || itself || (*view_)[other.lane] >= other.epoch) return;
        fail(place_, name_, " on ", lane_name(lane_), " touches ", kMemoryName[int(memory)], " near byte ", offset,
             ", which was ", what, " at ", where(other.place), " on ", lane_name(other.lane), " with no wait between");
    }

    const char *name_;
    Place place_;
    std::unique_lock<std::mutex> lock_;
    Clock *view_;
    int lane_;
    uint32_t epoch_;
    size_t written_ = 0;
};

// What a flag set on this pipe now proves to whoever waits for it.
inline Clock proof(const Core &c, int pipe)
{
    Clock clock = c.view[pipe];
    clock[lane_of(c, pipe)] = c.count[pipe];
    return clock;
}

// The sets and waits of the flag that this names do nothing: "MTE2_V(0)", "CROSS_CORE(3)". Tests plant missing
// waits with it.
inline std::string dropped;
inline bool drops(const char *from, const char *to, int id)
{
    return !dropped.empty() && dropped == std::string(from) + "_" + to + "(" + std::to_string(id) + ")";
}

// Products so far, and those that ran beside loads of what others multiply.
inline uint32_t products = 0, products_beside_loads = 0;

// Results of AIV 0's vector instructions so far, each in units of 256 bytes, sums of rows aside.
inline uint32_t vector_results = 0;
inline Instruction::~Instruction()
{
    const bool sums = std::strcmp(name_, "ReduceRepeat") == 0;
    if (lane_ == kPipes + PIPE_V && !sums) vector_results += (written_ + 255) / 256;
}

// Runs `kernel` as one block after another, each with its three cores; throws the first failure.
inline void launch(int64_t blocks, const std::function<void()> &kernel)
{
    for (int64_t i = 0; i < blocks; ++i) {
        Block b;
        b.index = i;
        b.count = blocks;
        auto run = [&](Core &c) {
            t_block = &b;
            t_core = &c;
            std::string failure;
            try {
                kernel();
            } catch (const std::exception &e) {
                failure = e.what();
            }
            std::lock_guard<std::mutex> lock(b.mutex);
            if (!failure.empty() && b.failure.empty()) b.failure = failure;
            c.ended = true;
            b.changed.notify_all();
            t_core = nullptr;
        };
        std::vector<std::thread> threads;
        for (Core &c : b.cores) threads.emplace_back(run, std::ref(c));
        for (std::thread &t : threads) t.join();
        if (!b.failure.empty()) throw Failure(b.failure);
        for (const Core &c : b.cores) {
            for (int from = 0; from < kPipes; ++from)
                for (int to = 0; to < kPipes; ++to)
                    for (int id = 0; id < kEvents; ++id)
                        if (c.flags[from][to][id].set)
                            throw Failure(where(c.flags[from][to][id].place) + ": " + c.name() + ": SetFlag<" +
                                          kPipeName[from] + "_" + kPipeName[to] + ">(" + std::to_string(id) +
                                          ") is never waited for");
            for (int id = 0; id < kCrossFlags; ++id)
                if (!c.arrived[id].empty())
                    throw Failure(c.name() + " ends with cross-core flag " + std::to_string(id) + " at " +
                                  std::to_string(c.arrived[id].size()));
        }
        for (int id = 0; id < kCrossFlags; ++id)
            if (!b.half_set[id][0].empty() || !b.half_set[id][1].empty())
                throw Failure("cross-core flag " + std::to_string(id) + " was set by one vector core more often");
    }
}

// kernel<<<blocks, dynamic memory, stream>>>, called with its arguments; launch.sed writes it.
// doc: ../guide: SIMD与SIMT混合编程
template <class... Parameters>
struct Launched {
    int64_t blocks;
    uint32_t dynamic;
    void *stream;
    void (*kernel)(Parameters...);

    void operator()(Parameters... arguments) const
    {
        std::ostringstream line;
        line << "launch of " << blocks << " blocks on stream " << reinterpret_cast<uintptr_t>(stream);
        fake_log(line.str());
        launch(blocks, [&] { kernel(arguments...); });
    }
};
template <class... Parameters>
Launched(int64_t, uint32_t, void *, void (*)(Parameters...)) -> Launched<Parameters...>;

}  // namespace emulation

namespace AscendC {

using emulation::Instruction;
using emulation::Memory;
using emulation::merge;
using emulation::Place;
using emulation::require;
using emulation::where;

// doc: 辅助数据结构/TPosition
enum class TPosition { GM, A1, A2, B1, B2, C1, C2, CO1, CO2, VECIN, VECOUT, VECCALC };

// doc: 工具接口/系统资源与变量/{GetBlockIdx, GetBlockNum, GetSubBlockIdx(ISASI)}
inline int64_t GetBlockIdx()
{
    const emulation::Core &c = emulation::core();
    return c.kind == emulation::Kind::AIC ? emulation::block().index : 2 * emulation::block().index + c.sub;
}
inline int64_t GetBlockNum() { return emulation::block().count; }
inline int64_t GetSubBlockIdx() { return emulation::core().sub; }

// doc: 工具接口/系统初始化/InitSocState
inline void InitSocState() {}

// doc: 数据结构/GlobalTensor/{SetGlobalBuffer, operator}. Without a size there is no bound to check, so the
// emulation asks for one.
template <class T>
class GlobalTensor {
public:
    void SetGlobalBuffer(__gm__ T *buffer, uint64_t size)
    {
        data_ = buffer;
        size_ = size;
    }
    GlobalTensor operator[](uint64_t offset) const
    {
        GlobalTensor t;
        t.data_ = data_ + offset;
        t.size_ = offset <= size_ ? size_ - offset : 0;
        return t;
    }
    // doc: 数据结构/GlobalTensor/GetValue
    T GetValue(uint64_t offset, Place place = Place::current()) const
    {
        Instruction i("GetValue", PIPE_S, place);
        return *at(i, offset, 1);
    }
    T *at(const Instruction &i, uint64_t offset, uint64_t count) const
    {
        require(offset + count <= size_, i.place(), i.name(), " touches elements ", offset, "..", offset + count,
                " of a global tensor that has ", size_);
        return data_ + offset;
    }

private:
    T *data_ = nullptr;
    uint64_t size_ = 0;
};

// doc: 数据结构/LocalTensor/LocalTensor构造函数 (static tensor programming: position, byte address, elements)
template <class T>
class LocalTensor {
public:
    LocalTensor() = default;
    LocalTensor(TPosition position, uint32_t address, uint32_t size, Place place = Place::current())
        : position_(position), address_(address), size_(size)
    {
        require(address % 32 == 0, place, "a local tensor starts at byte ", address, ", which is no multiple of 32");
        const size_t room = emulation::kMemorySize[int(memory(0))];
        require(address + size_t{size} * sizeof(T) <= room, place, "a local tensor ends at byte ",
                address + size_t{size} * sizeof(T), " of ", emulation::kMemoryName[int(memory(0))], ", which has ",
                room);
    }
    LocalTensor operator[](uint32_t offset) const
    {
        LocalTensor t = *this;
        t.address_ += offset * sizeof(T);
        t.size_ = offset <= size_ ? size_ - offset : 0;
        return t;
    }
    template <class U>
    LocalTensor<U> ReinterpretCast() const
    {
        return LocalTensor<U>(position_, address_, size_ * sizeof(T) / sizeof(U));
    }
    // doc: 数据结构/LocalTensor/{GetValue, SetValue}
    T GetValue(uint32_t index, Place place = Place::current()) const
    {
        Instruction i("GetValue", PIPE_S, place);
        return *read(i, index, 1);
    }
    void SetValue(uint32_t index, T value, Place place = Place::current()) const
    {
        Instruction i("SetValue", PIPE_S, place);
        *write(i, index, 1) = value;
    }
    uint32_t GetSize() const { return size_; }

    Memory memory(int sub) const
    {
        switch (position_) {
            case TPosition::A1:
            case TPosition::B1:
            case TPosition::C1: return Memory::L1;
            case TPosition::A2: return Memory::L0A;
            case TPosition::B2: return Memory::L0B;
            case TPosition::CO1: return Memory::L0C;
            default: return sub == 0 ? Memory::UB0 : Memory::UB1;
        }
    }
    bool in_ub() const { return memory(0) == Memory::UB0; }
    uint32_t address() const { return address_; }

    const T *read(Instruction &i, size_t offset, size_t count, int sub = emulation::core().sub) const
    {
        return reinterpret_cast<const T *>(i.read(memory(sub), range(i, offset, count), count * sizeof(T)));
    }
    T *write(Instruction &i, size_t offset, size_t count, int sub = emulation::core().sub, bool forwarded = false) const
    {
        return reinterpret_cast<T *>(i.write(memory(sub), range(i, offset, count), count * sizeof(T), forwarded));
    }
    void aligned(const Instruction &i, uint32_t bytes) const
    {
        require(address_ % bytes == 0, i.place(), i.name(), " needs its tensor aligned to ", bytes, " bytes, got byte ",
                address_);
    }

private:
    size_t range(const Instruction &i, size_t offset, size_t count) const
    {
        require(offset + count <= size_, i.place(), i.name(), " touches elements ", offset, "..", offset + count,
                " of a local tensor that has ", size_);
        return address_ + offset * sizeof(T);
    }

    TPosition position_ = TPosition::VECCALC;
    uint32_t address_ = 0;
    uint32_t size_ = 0;
};

template <class T>
void vector_operand(const Instruction &i, const LocalTensor<T> &t)
{
    require(emulation::core().kind == emulation::Kind::AIV && t.in_ub(), i.place(), i.name(),
            " works in the unified buffer of a vector core");
    t.aligned(i, 32);  // doc: 通用说明和约束 (通用地址对齐约束)
}

// ---- synchronisation -------------------------------------------------------------------------------------------

// doc: 同步控制/核内同步/SetFlag-WaitFlag(ISASI); the pairs of 核内同步能力概述, tables 2 and 3
enum class HardEvent {
    MTE2_MTE1, MTE1_MTE2, MTE1_M, M_MTE1, M_FIX, FIX_M, MTE2_V, V_MTE2, V_MTE3, MTE3_V, MTE2_MTE3, MTE3_MTE2,
    S_V, V_S, MTE2_S, S_MTE2, S_MTE3, MTE3_S, FIX_MTE1,
};
constexpr std::array<std::array<int, 2>, 19> kEventPipes{{
    {PIPE_MTE2, PIPE_MTE1}, {PIPE_MTE1, PIPE_MTE2}, {PIPE_MTE1, PIPE_M}, {PIPE_M, PIPE_MTE1}, {PIPE_M, PIPE_FIX},
    {PIPE_FIX, PIPE_M}, {PIPE_MTE2, PIPE_V}, {PIPE_V, PIPE_MTE2}, {PIPE_V, PIPE_MTE3}, {PIPE_MTE3, PIPE_V},
    {PIPE_MTE2, PIPE_MTE3}, {PIPE_MTE3, PIPE_MTE2}, {PIPE_S, PIPE_V}, {PIPE_V, PIPE_S}, {PIPE_MTE2, PIPE_S},
    {PIPE_S, PIPE_MTE2}, {PIPE_S, PIPE_MTE3}, {PIPE_MTE3, PIPE_S}, {PIPE_FIX, PIPE_MTE1},
}};

template <HardEvent event>
void SetFlag(int32_t id, Place place = Place::current())
{
    constexpr auto pipes = kEventPipes[int(event)];
    require(id >= 0 && id < emulation::kEvents, place, "SetFlag: event ", id, " is not in 0..7");
    if (emulation::drops(emulation::kPipeName[pipes[0]], emulation::kPipeName[pipes[1]], id)) return;
    std::lock_guard<std::mutex> lock(emulation::block().mutex);
    emulation::Core &c = emulation::core();
    emulation::Flag &flag = c.flags[pipes[0]][pipes[1]][id];
    require(!flag.set, place, "SetFlag<", emulation::kPipeName[pipes[0]], "_", emulation::kPipeName[pipes[1]], ">(", id,
            ") twice without a wait; the first was at ", where(flag.place));
    flag = {true, emulation::proof(c, pipes[0]), place};
}

template <HardEvent event>
void WaitFlag(int32_t id, Place place = Place::current())
{
    constexpr auto pipes = kEventPipes[int(event)];
    require(id >= 0 && id < emulation::kEvents, place, "WaitFlag: event ", id, " is not in 0..7");
    if (emulation::drops(emulation::kPipeName[pipes[0]], emulation::kPipeName[pipes[1]], id)) return;
    std::lock_guard<std::mutex> lock(emulation::block().mutex);
    emulation::Core &c = emulation::core();
    emulation::Flag &flag = c.flags[pipes[0]][pipes[1]][id];
    require(flag.set, place, "WaitFlag<", emulation::kPipeName[pipes[0]], "_", emulation::kPipeName[pipes[1]], ">(", id,
            ") for a flag that nothing has set");
    flag.set = false;
    merge(c.view[pipes[1]], flag.clock);
}

// doc: 同步控制/核内同步/PipeBarrier(ISASI)
template <pipe_t pipe>
void PipeBarrier()
{
    static_assert(pipe != PIPE_S, "the scalar pipe has no barrier");
    std::lock_guard<std::mutex> lock(emulation::block().mutex);
    emulation::Core &c = emulation::core();
    if (pipe == PIPE_ALL) {
        emulation::Clock all{};
        for (int p = 0; p < emulation::kPipes; ++p) merge(all, emulation::proof(c, p));
        for (emulation::Clock &view : c.view) merge(view, all);
    } else {
        c.view[pipe] = emulation::proof(c, pipe);
    }
}

// doc: 同步控制/核间同步/{CrossCoreSetFlag(ISASI), CrossCoreWaitFlag(ISASI), 关键特性说明}. Mode 2 only: the cube
// core with both of its vector cores.
template <uint8_t mode, pipe_t pipe>
void CrossCoreSetFlag(uint16_t id, Place place = Place::current())
{
    static_assert(mode == 2, "the emulation has mode 2 only");
    static_assert(pipe != PIPE_S && pipe != PIPE_ALL, "modes 0 to 2 take neither PIPE_S nor PIPE_ALL");
    require(id < emulation::kCrossFlags, place, "CrossCoreSetFlag: flag ", id, " is not in 0..15");
    if (emulation::drops("CROSS", "CORE", id)) return;
    emulation::Block &b = emulation::block();
    std::lock_guard<std::mutex> lock(b.mutex);
    emulation::Core &c = emulation::core();
    const emulation::Clock clock = emulation::proof(c, pipe);
    auto arrive = [&](emulation::Core &to, const emulation::Clock &with) {
        to.arrived[id].push_back(with);
        require(to.arrived[id].size() <= emulation::kCounterMax, place, "CrossCoreSetFlag: the counter of flag ", id,
                " of ", to.name(), " passes 15");
    };
    if (c.kind == emulation::Kind::AIC) {
        arrive(b.cores[1], clock);
        arrive(b.cores[2], clock);
    } else {
        auto &halves = b.half_set[id];
        halves[c.sub].push_back(clock);
        require(halves[c.sub].size() <= emulation::kCounterMax, place, "CrossCoreSetFlag: ", c.name(), " set flag ", id,
                " more than 15 times ahead of the other vector core");
        if (!halves[0].empty() && !halves[1].empty()) {
            emulation::Clock both = halves[0].front();
            merge(both, halves[1].front());
            halves[0].pop_front();
            halves[1].pop_front();
            arrive(b.cores[0], both);
        }
    }
    b.changed.notify_all();
}

template <uint8_t mode = 0, pipe_t pipe = PIPE_S>
void CrossCoreWaitFlag(uint16_t id, Place place = Place::current())
{
    require(id < emulation::kCrossFlags, place, "CrossCoreWaitFlag: flag ", id, " is not in 0..15");
    if (emulation::drops("CROSS", "CORE", id)) return;
    emulation::Block &b = emulation::block();
    std::unique_lock<std::mutex> lock(b.mutex);
    emulation::Core &c = emulation::core();
    c.waits_for = id;
    while (c.arrived[id].empty()) {
        if (!b.failure.empty()) break;
        if (std::all_of(b.cores.begin(), b.cores.end(), [](const emulation::Core &other) { return other.stuck(); })) {
            std::ostringstream text;
            text << where(place) << ": " << c.name() << ": deadlock: waits for cross-core flag " << id
                 << " while every other core waits or has ended";
            b.failure = text.str();
            b.changed.notify_all();
            break;
        }
        b.changed.wait(lock);
    }
    c.waits_for = -1;
    if (c.arrived[id].empty()) throw emulation::Failure(b.failure);
    merge(c.view[pipe], c.arrived[id].front());
    c.arrived[id].pop_front();
}

// ---- data movement ---------------------------------------------------------------------------------------------

// doc: 矩阵计算（ISASI）/矩阵计算的搬入/DataCopy（GMToL1随路转换-ND2NZ搬运）
struct Nd2NzParams {
    uint16_t ndNum = 0;
    uint16_t nValue = 0;
    uint16_t dValue = 0;
    uint16_t srcNdMatrixStride = 0;
    uint16_t srcDValue = 0;
    uint16_t dstNzC0Stride = 0;
    uint16_t dstNzNStride = 0;
    uint16_t dstNzMatrixStride = 0;
};

template <class T>
void DataCopy(const LocalTensor<T> &dst, const GlobalTensor<T> &src, const Nd2NzParams &p,
              Place place = Place::current())
{
    Instruction i("DataCopy (ND2NZ)", PIPE_MTE2, place);
    require(dst.memory(0) == Memory::L1, place, "DataCopy (ND2NZ) goes to L1");
    require(p.ndNum == 1, place, "DataCopy (ND2NZ): the emulation copies one matrix, got ndNum = ", p.ndNum);
    require(p.nValue <= 16384 && p.srcDValue >= 1 && p.dstNzC0Stride >= 1 && p.dstNzC0Stride <= 16384 &&
                p.dstNzNStride >= 1 && p.dstNzNStride <= 16384,
            place, "DataCopy (ND2NZ): a parameter is out of its range");
    dst.aligned(i, 32);
    constexpr uint32_t c0 = 32 / sizeof(T);
    for (uint32_t r = 0; r < p.nValue; ++r) {
        const T *row = src.at(i, uint64_t{r} * p.srcDValue, p.dValue);
        for (uint32_t c = 0; c < p.dValue; c += c0) {
            T *to = dst.write(i, size_t{c / c0} * p.dstNzC0Stride * c0 + size_t{r} * p.dstNzNStride * c0, c0);
            for (uint32_t k = 0; k < c0; ++k) to[k] = c + k < p.dValue ? row[c + k] : T(0.0f);
        }
    }
}

// doc: Memory矢量计算/数据搬运/DataCopyPad（GMToUB非对齐数据搬运）, DataCopyPad（UBToGM非对齐数据搬运）
struct DataCopyExtParams {
    uint16_t blockCount = 1;
    uint32_t blockLen = 0;
    int64_t srcStride = 0;
    int64_t dstStride = 0;
    uint32_t rsv = 0;
};
template <class T>
struct DataCopyPadExtParams {
    bool isPad = false;
    uint8_t leftPadding = 0;
    uint8_t rightPadding = 0;
    T paddingValue{};
};

template <class T>
void DataCopyPad(const LocalTensor<T> &dst, const GlobalTensor<T> &src, const DataCopyExtParams &p,
                 const DataCopyPadExtParams<T> &pad, Place place = Place::current())
{
    Instruction i("DataCopyPad (GM to UB)", PIPE_MTE2, place);
    vector_operand(i, dst);
    require(p.blockCount >= 1 && p.blockCount <= 4095 && p.blockLen >= 1 && p.blockLen <= 2097151 &&
                p.blockLen % sizeof(T) == 0 && p.srcStride % int64_t{sizeof(T)} == 0,
            place, "DataCopyPad: a parameter is out of its range");
    require(!pad.isPad && pad.leftPadding == 0 && pad.rightPadding == 0, place,
            "DataCopyPad: the emulation pads nothing");
    const uint64_t count = p.blockLen / sizeof(T);
    const uint64_t padded = (p.blockLen + 31) / 32 * 32 / sizeof(T);
    for (uint64_t b = 0; b < p.blockCount; ++b) {
        const T *from = src.at(i, b * (count + p.srcStride / sizeof(T)), count);
        T *to = dst.write(i, b * (padded + p.dstStride * (32 / sizeof(T))), padded);
        std::memcpy(to, from, p.blockLen);
        for (uint64_t k = count; k < padded; ++k) to[k] = from[0];
    }
}

template <class T>
void DataCopyPad(const GlobalTensor<T> &dst, const LocalTensor<T> &src, const DataCopyExtParams &p,
                 Place place = Place::current())
{
    Instruction i("DataCopyPad (UB to GM)", PIPE_MTE3, place);
    vector_operand(i, src);
    require(p.blockCount >= 1 && p.blockCount <= 4095 && p.blockLen >= 1 && p.blockLen <= 2097151 &&
                p.blockLen % sizeof(T) == 0 && p.dstStride % int64_t{sizeof(T)} == 0 && p.srcStride <= 65535,
            place, "DataCopyPad: a parameter is out of its range");
    const uint64_t count = p.blockLen / sizeof(T);
    const uint64_t padded = (p.blockLen + 31) / 32 * 32 / sizeof(T);
    for (uint64_t b = 0; b < p.blockCount; ++b) {
        const T *from = src.read(i, b * (padded + p.srcStride * (32 / sizeof(T))), count);
        std::memcpy(dst.at(i, b * (count + p.dstStride / sizeof(T)), count), from, p.blockLen);
    }
}

// doc: 矩阵计算（ISASI）/矩阵计算的搬入/DataCopy（UBToL1高维切分数据搬运), the hardware path
// (ENABLE_CV_COMM_VIA_SSBUF)
struct DataCopyParams {
    uint16_t blockCount = 1;
    uint16_t blockLen = 0;
    uint16_t srcStride = 0;
    uint16_t dstStride = 0;
};

template <class T>
void DataCopy(const LocalTensor<T> &dst, const LocalTensor<T> &src, const DataCopyParams &p,
              Place place = Place::current())
{
    Instruction i("DataCopy (UB to L1)", PIPE_MTE3, place);
    vector_operand(i, src);
    require(dst.memory(0) == Memory::L1, place, "DataCopy (UB to L1) goes to L1");
    require(p.blockCount >= 1 && p.blockCount <= 4095 && p.blockLen >= 1, place,
            "DataCopy (UB to L1): a parameter is out of its range");
    dst.aligned(i, 32);
    constexpr size_t c0 = 32 / sizeof(T);
    for (size_t b = 0; b < p.blockCount; ++b) {
        const T *from = src.read(i, b * (p.blockLen + p.srcStride) * c0, p.blockLen * c0);
        std::memcpy(dst.write(i, b * (p.blockLen + p.dstStride) * c0, p.blockLen * c0), from, p.blockLen * size_t{32});
    }
}

// doc: 矩阵计算（ISASI）/矩阵计算的搬入/LoadData_2D_V2; layouts: 矩阵计算分形介绍/关键分形格式详解 (Nz × Zn = Nz)
struct LoadData2DParamsV2 {
    uint32_t mStartPosition = 0;
    uint32_t kStartPosition = 0;
    uint16_t mStep = 0;
    uint16_t kStep = 0;
    int32_t srcStride = 0;
    uint16_t dstStride = 0;
    bool ifTranspose = false;
    uint8_t sid = 0;
};

template <class T>
void LoadData(const LocalTensor<T> &dst, const LocalTensor<T> &src, const LoadData2DParamsV2 &p,
              Place place = Place::current())
{
    static_assert(sizeof(T) == 2, "the emulation loads 16-bit types");
    Instruction i("LoadData", PIPE_MTE1, place);
    require(src.memory(0) == Memory::L1 && (dst.memory(0) == Memory::L0A || dst.memory(0) == Memory::L0B), place,
            "LoadData goes from L1 to L0A or L0B");
    require(p.mStep <= 255 && p.kStep <= 255, place, "LoadData: mStep and kStep reach 255");
    src.aligned(i, 32);
    dst.aligned(i, 512);
    constexpr size_t fractal = 256;  // elements of 512 bytes
    for (size_t k = 0; k < p.kStep; ++k) {
        for (size_t m = 0; m < p.mStep; ++m) {
            const T *from = src.read(i, ((p.kStartPosition + k) * p.srcStride + p.mStartPosition + m) * fractal, fractal);
            T *to = dst.write(i, (p.ifTranspose ? m * p.dstStride + k : k * p.dstStride + m) * fractal, fractal);
            for (size_t r = 0; r < 16; ++r)
                for (size_t c = 0; c < 16; ++c) to[p.ifTranspose ? c * 16 + r : r * 16 + c] = from[r * 16 + c];
        }
    }
}

// doc: 矩阵计算（ISASI）/Mmad计算/Mmad
struct MmadParams {
    uint16_t m = 0;
    uint16_t n = 0;
    uint16_t k = 0;
    bool cmatrixInitVal = true;
    bool cmatrixSource = false;
    uint8_t unitFlag = 0;
    bool disableGemv = false;
};

template <class T>
void Mmad(const LocalTensor<float> &dst, const LocalTensor<T> &a, const LocalTensor<T> &b, const MmadParams &p,
          Place place = Place::current())
{
    Instruction i("Mmad", PIPE_M, place);
    ++emulation::products;
    emulation::products_beside_loads += i.beside(PIPE_MTE2) > 0;
    require(dst.memory(0) == Memory::L0C && a.memory(0) == Memory::L0A && b.memory(0) == Memory::L0B, place,
            "Mmad multiplies L0A by L0B into L0C");
    require(p.m >= 1 && p.m <= 4095 && p.n >= 1 && p.n <= 4095 && p.k >= 1 && p.k <= 4095, place,
            "Mmad: m, n and k are 1 to 4095");
    require(p.m > 1 || p.disableGemv, place, "Mmad: the emulation has no GEMV mode (m = 1)");
    require(!p.cmatrixSource && p.unitFlag == 0, place, "Mmad: the emulation has no bias table and no unitFlag");
    a.aligned(i, 512);
    b.aligned(i, 512);
    dst.aligned(i, 1024);
    const size_t M = (p.m + 15) / 16 * 16, N = (p.n + 15) / 16 * 16, K = (p.k + 15) / 16 * 16;
    const T *A = a.read(i, 0, M * K);
    const T *B = b.read(i, 0, K * N);
    // Accumulating on a tile this large needs no barrier between the products.
    const bool forwarded = !p.cmatrixInitVal && (p.m / 16) * (p.n / 16) >= 10;
    float *C = dst.write(i, 0, M * N, 0, forwarded);
    // The factors as floats, [k][m] and [k][n].
    auto widened = [&](const T *from, size_t rows, size_t padded) {
        std::vector<float> to(p.k * rows);
        for (size_t k = 0; k < p.k; ++k)
            for (size_t r = 0; r < rows; ++r)
                to[k * rows + r] = static_cast<float>(from[(k / 16) * padded * 16 + r * 16 + k % 16]);
        return to;
    };
    const std::vector<float> left = widened(A, p.m, M), right = widened(B, p.n, N);
    std::vector<float> sums(p.n);
    for (size_t m = 0; m < p.m; ++m) {
        auto out = [&](size_t n) -> float & { return C[(n / 16) * M * 16 + m * 16 + n % 16]; };
        for (size_t n = 0; n < p.n; ++n) sums[n] = p.cmatrixInitVal ? 0.0f : out(n);
        for (size_t k = 0; k < p.k; ++k) {
            const float a = left[k * p.m + m];
            for (size_t n = 0; n < p.n; ++n) sums[n] += a * right[k * p.n + n];
        }
        for (size_t n = 0; n < p.n; ++n) out(n) = sums[n];
    }
}

// doc: 矩阵计算（ISASI）/矩阵计算的搬出/Fixpipe（L0C到UB数据搬运）, Fixpipe（L0C到L1数据搬运）,
// 矩阵搬出关键特性说明/L0C-Buffer到UB双目标模式. The page's table writes dualDstCtrl, its sample dualDstCtl.
enum class CO2Layout : uint8_t { NZ, ROW_MAJOR };
struct FixpipeConfig {
    CO2Layout format;
    bool isToUB = false;
};
constexpr FixpipeConfig CFG_NZ{CO2Layout::NZ};
constexpr FixpipeConfig CFG_ROW_MAJOR{CO2Layout::ROW_MAJOR};
template <CO2Layout format>
struct FixpipeParamsArch3510 {
    uint16_t nSize = 0;
    uint16_t mSize = 0;
    uint16_t srcStride = 0;
    uint32_t dstStride = 0;
    QuantMode_t quantPre = NoQuant;
    uint8_t unitFlag = 0;
    uint8_t dualDstCtl = 0;
    uint8_t subBlockId = 0;
};

template <class T, class U, const FixpipeConfig &config>
void Fixpipe(const LocalTensor<T> &dst, const LocalTensor<U> &src, const FixpipeParamsArch3510<config.format> &p,
             Place place = Place::current())
{
    static_assert(std::is_same_v<U, float>, "the emulation moves float results");
    Instruction i("Fixpipe", PIPE_FIX, place);
    constexpr bool nz = config.format == CO2Layout::NZ;
    require(src.memory(0) == Memory::L0C, place, "Fixpipe reads L0C");
    require(dst.in_ub() == config.isToUB && (config.isToUB || dst.memory(0) == Memory::L1), place,
            "Fixpipe: isToUB must say whether the result goes to a unified buffer or to L1");
    const QuantMode_t cast = std::is_same_v<T, half> ? F322F16 : std::is_same_v<T, bfloat16_t> ? F322BF16 : NoQuant;
    require(p.quantPre == cast, place, "Fixpipe: quantPre does not fit the type of the result");
    require(p.nSize >= 1 && p.nSize <= 4095 && p.nSize % 16 == 0 && p.mSize >= 1 && p.dstStride >= 1 && p.unitFlag == 0,
            place, "Fixpipe: a parameter is out of its range");
    require(p.dualDstCtl == 0 || (config.isToUB && p.dualDstCtl == 1 && p.mSize % 2 == 0), place,
            "Fixpipe: the emulation splits results between unified buffers by rows, an even number of them");
    src.aligned(i, 64);
    dst.aligned(i, 32);
    const size_t half_rows = p.dualDstCtl == 1 ? p.mSize / 2 : p.mSize;
    constexpr size_t c0 = nz ? 32 / sizeof(T) : 16;
    for (size_t m = 0; m < p.mSize; ++m) {
        const int sub = p.dualDstCtl == 1 ? int(m / half_rows) : p.subBlockId;
        for (size_t n = 0; n < p.nSize; n += 16) {
            const float *from = src.read(i, (n / 16) * p.srcStride * 16 + m * 16, 16);
            for (size_t k = 0; k < 16; k += c0) {
                const size_t row = m % half_rows;
                const size_t at = nz ? ((n + k) / c0) * p.dstStride + row * c0 : row * p.dstStride + n + k;
                T *to = dst.write(i, at, c0, sub);
                for (size_t j = 0; j < c0; ++j) to[j] = static_cast<T>(from[k + j]);
            }
        }
    }
}

// doc: 矩阵计算（ISASI）/矩阵计算的搬出/Fixpipe（L0C到GM数据搬运）
template <class T, class U, const FixpipeConfig &config>
void Fixpipe(const GlobalTensor<T> &dst, const LocalTensor<U> &src, const FixpipeParamsArch3510<config.format> &p,
             Place place = Place::current())
{
    static_assert(std::is_same_v<U, float> && std::is_same_v<T, float> && config.format == CO2Layout::ROW_MAJOR,
                  "the emulation moves float results to global memory by rows");
    Instruction i("Fixpipe (to GM)", PIPE_FIX, place);
    require(src.memory(0) == Memory::L0C && !config.isToUB, place, "Fixpipe reads L0C; isToUB is for unified buffers");
    require(p.nSize >= 1 && p.nSize <= 4095 && p.nSize % 16 == 0 && p.mSize >= 1 && p.dstStride >= 1 && p.unitFlag == 0 &&
                p.quantPre == NoQuant && p.dualDstCtl == 0,
            place, "Fixpipe: a parameter is out of its range");
    src.aligned(i, 64);
    for (size_t m = 0; m < p.mSize; ++m) {
        for (size_t n = 0; n < p.nSize; n += 16) {
            const float *from = src.read(i, (n / 16) * p.srcStride * 16 + m * 16, 16);
            std::copy_n(from, 16, dst.at(i, m * p.dstStride + n, 16));
        }
    }
}

// ---- vector ----------------------------------------------------------------------------------------------------

// doc: 辅助数据结构/{UnaryRepeatParams, BinaryRepeatParams}, Memory矢量计算/SIMD计算说明/高维切分
struct BinaryRepeatParams {
    uint8_t dstBlkStride = 1, src0BlkStride = 1, src1BlkStride = 1;
    uint8_t dstRepStride = 8, src0RepStride = 8, src1RepStride = 8;
};

template <class T, class F>
void elementwise(Instruction &i, const LocalTensor<T> &dst, const LocalTensor<T> &a, const LocalTensor<T> &b,
                 int32_t count, F f)
{
    vector_operand(i, dst);
    vector_operand(i, a);
    vector_operand(i, b);
    require(count >= 1, i.place(), i.name(), ": a count of 0 is not sure to do nothing");
    const T *x = a.read(i, 0, count), *y = b.read(i, 0, count);
    T *out = dst.write(i, 0, count);
    for (int32_t k = 0; k < count; ++k) out[k] = f(x[k], y[k]);
}

// Repeats of 8 data blocks of 32 bytes; a source block stride of 0 reads the first block again and again.
template <class T, class F>
void repeated(Instruction &i, const LocalTensor<T> &dst, const LocalTensor<T> &a, const LocalTensor<T> &b, uint64_t mask,
              uint8_t repeats, const BinaryRepeatParams &p, F f)
{
    vector_operand(i, dst);
    vector_operand(i, a);
    vector_operand(i, b);
    constexpr size_t lanes = 32 / sizeof(T);
    require(mask >= 1 && mask <= 8 * lanes && mask % lanes == 0 && repeats >= 1, i.place(), i.name(),
            ": the emulation takes masks of whole data blocks and 1 to 255 repeats");
    require(p.dstBlkStride >= 1, i.place(), i.name(), ": dstBlkStride must not be 0");
    for (size_t r = 0; r < repeats; ++r) {
        for (size_t k = 0; k < mask / lanes; ++k) {
            const T *x = a.read(i, (r * p.src0RepStride + k * p.src0BlkStride) * lanes, lanes);
            const T *y = b.read(i, (r * p.src1RepStride + k * p.src1BlkStride) * lanes, lanes);
            T *out = dst.write(i, (r * p.dstRepStride + k * p.dstBlkStride) * lanes, lanes);
            for (size_t j = 0; j < lanes; ++j) out[j] = f(x[j], y[j]);
        }
    }
}

// doc: Memory矢量计算/基础算术/{Add, Sub, Mul}
#define REWY_BINARY(NAME, OP)                                                                                          \
    template <class T>                                                                                                 \
    void NAME(const LocalTensor<T> &dst, const LocalTensor<T> &a, const LocalTensor<T> &b, int32_t count,              \
              Place place = Place::current())                                                                          \
    {                                                                                                                  \
        Instruction i(#NAME, PIPE_V, place);                                                                           \
        elementwise(i, dst, a, b, count, [](T x, T y) { return x OP y; });                                             \
    }                                                                                                                  \
    template <class T>                                                                                                 \
    void NAME(const LocalTensor<T> &dst, const LocalTensor<T> &a, const LocalTensor<T> &b, uint64_t mask,              \
              uint8_t repeats, const BinaryRepeatParams &p, Place place = Place::current())                            \
    {                                                                                                                  \
        Instruction i(#NAME, PIPE_V, place);                                                                           \
        repeated(i, dst, a, b, mask, repeats, p, [](T x, T y) { return x OP y; });                                     \
    }
REWY_BINARY(Add, +)
REWY_BINARY(Sub, -)
REWY_BINARY(Mul, *)
#undef REWY_BINARY

// doc: Memory矢量计算/基础算术/Muls
template <class T>
void Muls(const LocalTensor<T> &dst, const LocalTensor<T> &src, T scalar, int32_t count, Place place = Place::current())
{
    Instruction i("Muls", PIPE_V, place);
    elementwise(i, dst, src, src, count, [scalar](T x, T) { return x * scalar; });
}

// doc: Memory矢量计算/基础算术/Exp (the default algorithm flushes subnormal results to 0)
template <class T>
void Exp(const LocalTensor<T> &dst, const LocalTensor<T> &src, int32_t count, Place place = Place::current())
{
    Instruction i("Exp", PIPE_V, place);
    elementwise(i, dst, src, src, count, [](T x, T) {
        const T y = std::exp(x);
        return std::fpclassify(y) == FP_SUBNORMAL ? T(0) : y;
    });
}

// doc: Memory矢量计算/数据填充/Duplicate
template <class T>
void Duplicate(const LocalTensor<T> &dst, T scalar, int32_t count, Place place = Place::current())
{
    Instruction i("Duplicate", PIPE_V, place);
    vector_operand(i, dst);
    require(count >= 1, place, "Duplicate: a count of 0 is not sure to do nothing");
    std::fill_n(dst.write(i, 0, count), count, scalar);
}

// doc: Memory矢量计算/数据填充/Brcb
struct BrcbRepeatParams {
    uint16_t dstBlkStride = 1;
    uint16_t dstRepStride = 8;
};

template <class T>
void Brcb(const LocalTensor<T> &dst, const LocalTensor<T> &src, uint8_t repeats, const BrcbRepeatParams &p,
          Place place = Place::current())
{
    Instruction i("Brcb", PIPE_V, place);
    vector_operand(i, dst);
    vector_operand(i, src);
    require(p.dstBlkStride >= 1 && repeats >= 1, place, "Brcb: a parameter is out of its range");
    constexpr size_t lanes = 32 / sizeof(T);
    const T *from = src.read(i, 0, size_t{8} * repeats);
    for (size_t r = 0; r < repeats; ++r)
        for (size_t k = 0; k < 8; ++k)
            std::fill_n(dst.write(i, (r * p.dstRepStride + k * p.dstBlkStride) * lanes, lanes), lanes, from[r * 8 + k]);
}

// doc: Memory矢量计算/离散与聚合/Gather (offsets and base in bytes)
template <class T>
void Gather(const LocalTensor<T> &dst, const LocalTensor<T> &src, const LocalTensor<uint32_t> &offsets, uint32_t base,
            uint32_t count, Place place = Place::current())
{
    Instruction i("Gather", PIPE_V, place);
    vector_operand(i, dst);
    vector_operand(i, src);
    vector_operand(i, offsets);
    require(count >= 1, place, "Gather: a count of 0 is not sure to do nothing");
    require(base % sizeof(T) == 0, place, "Gather: base ", base, " is no multiple of the element's size");
    require(dst.address() + count * sizeof(T) <= src.address() ||
                src.address() + src.GetSize() * sizeof(T) <= dst.address(),
            place, "Gather: source and result overlap");
    const uint32_t *from = offsets.read(i, 0, count);
    T *to = dst.write(i, 0, count);
    for (uint32_t k = 0; k < count; ++k) {
        require(from[k] % sizeof(T) == 0, place, "Gather: offset ", from[k], " is no multiple of the element's size");
        to[k] = *src.read(i, (size_t{base} + from[k]) / sizeof(T), 1);
    }
}

// doc: Memory矢量计算/类型转换/Cast
enum class RoundMode { CAST_NONE, CAST_RINT };

template <class T, class U>
void Cast(const LocalTensor<T> &dst, const LocalTensor<U> &src, const RoundMode &mode, uint32_t count,
          Place place = Place::current())
{
    Instruction i("Cast", PIPE_V, place);
    vector_operand(i, dst);
    vector_operand(i, src);
    constexpr bool widens = sizeof(T) > sizeof(U);
    require(mode == (widens ? RoundMode::CAST_NONE : RoundMode::CAST_RINT), place,
            "Cast: CAST_NONE to a wider type, CAST_RINT to a narrower one");
    require(count >= 1, place, "Cast: a count of 0 is not sure to do nothing");
    const U *from = src.read(i, 0, count);
    T *to = dst.write(i, 0, count);
    for (uint32_t k = 0; k < count; ++k) to[k] = static_cast<T>(static_cast<float>(from[k]));
}

// doc: Memory矢量计算/归约计算/ReduceRepeat (a binary tree inside each repeat)
enum class ReduceType { SUM };

template <ReduceType type, class T, class U>
void ReduceRepeat(const LocalTensor<T> &dst, const LocalTensor<U> &src, int32_t mask, int32_t repeats,
                  int32_t dstRepStride, int32_t srcBlkStride, int32_t srcRepStride, Place place = Place::current())
{
    static_assert(std::is_same_v<T, float> && std::is_same_v<U, float>, "the emulation sums floats");
    Instruction i("ReduceRepeat", PIPE_V, place);
    vector_operand(i, src);
    require(dst.in_ub() && dst.address() % 4 == 0, place, "ReduceRepeat: the result is aligned to 4 bytes");
    require(mask >= 1 && mask <= 64 && mask % 8 == 0 && repeats >= 1 && repeats <= 255, place,
            "ReduceRepeat: the emulation takes masks of whole data blocks and 1 to 255 repeats");
    for (int32_t r = 0; r < repeats; ++r) {
        std::array<float, 64> tree{};
        for (int32_t k = 0; k < mask / 8; ++k) {
            const float *from = src.read(i, size_t(r * srcRepStride + k * srcBlkStride) * 8, 8);
            std::copy_n(from, 8, &tree[k * 8]);
        }
        for (int32_t width = 32; width >= 1; width /= 2)
            for (int32_t k = 0; k < width; ++k) tree[k] = tree[2 * k] + tree[2 * k + 1];
        *dst.write(i, size_t(r) * dstRepStride, 1) = tree[0];
    }
}

}  // namespace AscendC
