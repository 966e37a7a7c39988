/* A libcuda without a card, with the prototypes of cuda.h: what the tests of cuda.py load. It checks that each call has
   the context current, known handles and sizes that make sense; work is done when events are asked for, a piece at a
   time, in the order in which it was enqueued. */

#define _GNU_SOURCE
#include <fcntl.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS, INVALID_VALUE, OUT_OF_MEMORY, INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_READY = 600, ILLEGAL = 700 };
enum { MANY = 65536, STREAMS = 4096, ROOM = 1 << 24 };

typedef unsigned long long ptr;
typedef struct { int magic, recorded, done; } event;  /* how often; and up to which time that is done */
typedef struct { ptr into, from; size_t nbytes; event *mark; int time; } work;

static int context_object, streams[STREAMS], stream_count, failing;
static __thread void *stack[8];
static __thread int depth;
static work queue[MANY];
static int first, last;
static char *memory;
static size_t used;
static struct { void *start; size_t nbytes; } registered[MANY];
static int registered_count;
static struct { ptr at; size_t nbytes; int mapped, access; } reserved[MANY];
static int reserved_count;
typedef struct { int type, handles, kind, id; void *windows; unsigned char flags[8]; } properties;
typedef struct { int kind, id, flags; } permission;

int fake_events, fake_freed;

#define NEEDS_CONTEXT                                                  \
    if (!depth || stack[depth - 1] != &context_object) return INVALID_CONTEXT; \
    if (failing) return ILLEGAL

static int known(void *stream) { return !stream || ((int *)stream >= streams && (int *)stream < streams + stream_count); }

static int reachable(ptr at, size_t nbytes) {
    if (memory && at >= (ptr)memory && at + nbytes <= (ptr)memory + used) return 1;
    for (int i = 0; i < registered_count; i++) {
        ptr start = (ptr)registered[i].start;
        if (at >= start && at + nbytes <= start + registered[i].nbytes) return 1;
    }
    return 0;
}
static int mapped_at(ptr at, size_t nbytes, int writes) {
    for (int i = 0; i < reserved_count; i++)
        if (reserved[i].mapped && at >= reserved[i].at && at + nbytes <= reserved[i].at + reserved[i].nbytes)
            return reserved[i].access == 3 || (reserved[i].access == 1 && !writes) ? i + 1 : 0;
    return 0;
}

void fake_do(int pieces) {
    for (; pieces && first < last; pieces--) {
        work *each = &queue[first++ % MANY];
        if (each->mark) each->mark->done = each->time;
        else memcpy((void *)each->into, (void *)each->from, each->nbytes);
    }
}
void fake_fail(void) { failing = 1; }
void fake_heal(void) { failing = 0; }

int cuInit(unsigned flags) { return flags ? INVALID_VALUE : SUCCESS; }
int cuGetErrorName(int status, const char **name) {
    *name = status == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : status == ILLEGAL ? "CUDA_ERROR_ILLEGAL_ADDRESS" : "CUDA_ERROR";
    return SUCCESS;
}
int cuDriverGetVersion(int *version) { *version = 13000; return SUCCESS; }
static int devices = 1, peers;
void fake_devices(int number, int are_peers) { devices = number; peers = are_peers; }
int cuDeviceGetCount(int *count) { *count = devices; return SUCCESS; }
int cuDeviceCanAccessPeer(int *can, int device, int other) {
    *can = peers != 0;
    return device == other || device >= devices || other >= devices || peers < 0 ? 101 : SUCCESS;
}
int cuDeviceGetName(char *name, int room, int device) { strncpy(name, "Paper H100", (size_t)room); return device ? 101 : SUCCESS; }
int cuDeviceTotalMem_v2(size_t *nbytes, int device) { *nbytes = 80ull << 30; return device ? 101 : SUCCESS; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = attribute; return device ? 101 : SUCCESS; }
int cuDeviceGetUuid_v2(unsigned char *uuid, int device) {
    for (int i = 0; i < 16; i++) uuid[i] = (unsigned char)(i + device);
    return device >= devices ? 101 : SUCCESS;
}
int cuDeviceGetPCIBusId(char *text, int room, int device) { strncpy(text, "0000:FF:00.0", (size_t)room); return device ? 101 : SUCCESS; }
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = &context_object; return device ? 101 : SUCCESS; }
int cuCtxPushCurrent_v2(void *context) { stack[depth++] = context; return SUCCESS; }
int cuCtxPopCurrent_v2(void **context) {
    if (!depth) return INVALID_CONTEXT;
    *context = stack[--depth];
    return SUCCESS;
}
int cuCtxGetStreamPriorityRange(int *least, int *greatest) { NEEDS_CONTEXT; *least = 0; *greatest = -5; return SUCCESS; }

int cuPointerGetAttribute(void *value, int attribute, ptr address) {
    NEEDS_CONTEXT;
    int shared = mapped_at(address, 1, 0);
    if (shared) {
        if (attribute == 2) *(unsigned *)value = 2;
        else if (attribute == 9) *(int *)value = 0;
        else if (attribute == 11) *(ptr *)value = reserved[shared - 1].at;
        else *(size_t *)value = reserved[shared - 1].nbytes;
        return SUCCESS;
    }
    if (!memory || address < (ptr)memory || address >= (ptr)memory + ROOM) {
        if (!reachable(address, 1)) return INVALID_VALUE;
        if (attribute == 2) *(unsigned *)value = 1;
        else *(int *)value = 0;
        return SUCCESS;
    }
    if (attribute == 2) *(unsigned *)value = 2;
    else if (attribute == 9) *(int *)value = 0;
    else if (attribute == 11) *(ptr *)value = (ptr)memory;
    else if (attribute == 12) *(size_t *)value = ROOM;
    else return INVALID_VALUE;
    return SUCCESS;
}

int cuMemAlloc_v2(ptr *address, size_t nbytes) {
    NEEDS_CONTEXT;
    if (!memory) memory = aligned_alloc(4096, ROOM);
    if (nbytes > ROOM - used) return OUT_OF_MEMORY;
    *address = (ptr)memory + used;
    memset(memory + used, 0xA5, nbytes);
    used += (nbytes + 255) / 256 * 256;
    return SUCCESS;
}
int cuMemFree_v2(ptr address) {
    NEEDS_CONTEXT;
    if (!reachable(address, 1)) return INVALID_VALUE;
    fake_freed++;
    return SUCCESS;
}
int cuMemHostRegister_v2(void *address, size_t nbytes, unsigned flags) {
    NEEDS_CONTEXT;
    if ((flags != 1 && flags != 9) || !nbytes) return INVALID_VALUE;
    if (nbytes > ROOM) return OUT_OF_MEMORY;
    registered[registered_count].start = address;
    registered[registered_count++].nbytes = nbytes;
    return SUCCESS;
}
int cuMemHostUnregister(void *address) {
    NEEDS_CONTEXT;
    for (int i = 0; i < registered_count; i++)
        if (registered[i].start == address) {
            registered[i] = registered[--registered_count];
            fake_freed++;
            return SUCCESS;
        }
    return 713;
}

int cuStreamCreateWithPriority(void **stream, unsigned flags, int priority) {
    NEEDS_CONTEXT;
    if (flags != 1 || priority != -5 || stream_count == STREAMS) return INVALID_VALUE;
    *stream = &streams[stream_count++];
    return SUCCESS;
}
int cuEventCreate(void **made, unsigned flags) {
    NEEDS_CONTEXT;
    if (flags != 2) return INVALID_VALUE;
    event *it = calloc(1, sizeof(event));
    it->magic = 77;
    *made = it;
    fake_events++;
    return SUCCESS;
}
int cuEventRecord(event *it, void *stream) {
    NEEDS_CONTEXT;
    if (it->magic != 77 || !known(stream) || last - first == MANY) return INVALID_HANDLE;
    queue[last++ % MANY] = (work){0, 0, 0, it, ++it->recorded};
    return SUCCESS;
}
int cuStreamWaitEvent(void *stream, event *it, unsigned flags) {
    NEEDS_CONTEXT;
    return it->magic != 77 || !known(stream) || flags ? INVALID_HANDLE : SUCCESS;
}
int cuEventQuery(event *it) {
    NEEDS_CONTEXT;
    if (it->magic != 77) return INVALID_HANDLE;
    fake_do(1);
    return it->done == it->recorded ? SUCCESS : NOT_READY;
}
int cuMemcpyAsync(ptr into, ptr from, size_t nbytes, void *stream) {
    NEEDS_CONTEXT;
    if (!known(stream) || last - first == MANY) return INVALID_HANDLE;
    if (!reachable(into, nbytes) && !mapped_at(into, nbytes, 1)) return INVALID_VALUE;
    if (!reachable(from, nbytes) && !mapped_at(from, nbytes, 0)) return INVALID_VALUE;
    queue[last++ % MANY] = (work){into, from, nbytes, 0, 0};
    return SUCCESS;
}

/* Memory that processes share: a handle is a memory file. */
static int shareable(const properties *p) { return p->type == 1 && p->handles == 1 && p->kind == 1 && p->id == 0 && !p->windows; }
int cuMemGetAllocationGranularity(size_t *unit, const properties *p, int recommended) {
    NEEDS_CONTEXT;
    if (!shareable(p) || recommended != 1) return INVALID_VALUE;
    *unit = 8192;
    return SUCCESS;
}
int cuMemCreate(ptr *handle, size_t nbytes, const properties *p, ptr flags) {
    NEEDS_CONTEXT;
    if (!shareable(p) || !nbytes || nbytes % 8192 || flags) return INVALID_VALUE;
    if (nbytes > ROOM) return OUT_OF_MEMORY;
    int file = memfd_create("card", MFD_CLOEXEC);
    if (ftruncate(file, (off_t)nbytes)) return OUT_OF_MEMORY;
    *handle = (ptr)file;
    return SUCCESS;
}
int cuMemRelease(ptr handle) { NEEDS_CONTEXT; return close((int)handle) ? INVALID_VALUE : SUCCESS; }
int cuMemExportToShareableHandle(int *descriptor, ptr handle, int type, ptr flags) {
    NEEDS_CONTEXT;
    if (type != 1 || flags) return INVALID_VALUE;
    *descriptor = fcntl((int)handle, F_DUPFD_CLOEXEC, 3);
    return *descriptor < 0 ? INVALID_VALUE : SUCCESS;
}
int cuMemImportFromShareableHandle(ptr *handle, void *descriptor, int type) {
    NEEDS_CONTEXT;
    struct stat found;
    if (type != 1 || fstat((int)(ptr)descriptor, &found) || !S_ISREG(found.st_mode)) return INVALID_VALUE;
    *handle = (ptr)fcntl((int)(ptr)descriptor, F_DUPFD_CLOEXEC, 3);
    return SUCCESS;
}
int cuMemAddressReserve(ptr *at, size_t nbytes, size_t alignment, ptr where, ptr flags) {
    NEEDS_CONTEXT;
    if (!nbytes || alignment || where || flags) return INVALID_VALUE;
    void *made = mmap(0, nbytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (made == MAP_FAILED) return OUT_OF_MEMORY;
    reserved[reserved_count].at = *at = (ptr)made;
    reserved[reserved_count].mapped = reserved[reserved_count].access = 0;
    reserved[reserved_count++].nbytes = nbytes;
    return SUCCESS;
}
static int found(ptr at, size_t nbytes) {
    for (int i = 0; i < reserved_count; i++)
        if (reserved[i].at == at && reserved[i].nbytes == nbytes) return i + 1;
    return 0;
}
int cuMemMap(ptr at, size_t nbytes, size_t offset, ptr handle, ptr flags) {
    NEEDS_CONTEXT;
    struct stat is;
    int which = found(at, nbytes);
    if (!which || offset || flags || fstat((int)handle, &is) || (size_t)is.st_size < nbytes) return INVALID_VALUE;
    void *made = mmap((void *)at, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, (int)handle, 0);
    reserved[which - 1].mapped = made != MAP_FAILED;
    return made == MAP_FAILED ? INVALID_VALUE : SUCCESS;
}
int cuMemSetAccess(ptr at, size_t nbytes, const permission *who, size_t count) {
    NEEDS_CONTEXT;
    int which = found(at, nbytes);
    if (!which || !reserved[which - 1].mapped || count != 1 || who->kind != 1 || who->id) return INVALID_VALUE;
    reserved[which - 1].access = who->flags;
    return SUCCESS;
}
int cuMemUnmap(ptr at, size_t nbytes) {
    NEEDS_CONTEXT;
    int which = found(at, nbytes);
    if (!which || !reserved[which - 1].mapped) return INVALID_VALUE;
    reserved[which - 1].mapped = 0;
    return SUCCESS;
}
int cuMemAddressFree(ptr at, size_t nbytes) {
    NEEDS_CONTEXT;
    int which = found(at, nbytes);
    if (!which || reserved[which - 1].mapped) return INVALID_VALUE;
    munmap((void *)at, nbytes);
    reserved[which - 1] = reserved[--reserved_count];
    fake_freed++;
    return SUCCESS;
}
