/* A stand-in for CUDA's runtime: every call that torch makes, counted, and done on the host at once.

   Device memory is memory of the process; copies and fills really happen, kernels do not (stand_in_torch.py does
   what they would, where values matter). What is queued is over when the call returns, so nothing is asynchronous: whether
   streams are joined is for torch's own sanitizer to find, which follows events and not time. But for one thing: where a
   collective will never end, nothing that is queued behind it does, in whichever stream, and who waits for it waits.

   A call costs the host some time on a real device. It is made up: `stand_in_cost` sets it. */
#define _GNU_SOURCE
#include "stand_in.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

/* -- counting ----------------------------------------------------------------------------------------------------- */

static const char *names[] = {
#define NAME(kind) #kind,
    KINDS(NAME)
#undef NAME
};
static _Atomic long counts[NUM_KINDS];
static double cost_us[NUM_KINDS] = {
    [launch] = 2.5,      [memcpy_async] = 3.0, [memset_async] = 2.5, [event_create] = 0.5, [event_record] = 0.5,
    [event_query] = 0.3, [stream_wait] = 0.5,  [matmul] = 4.0,       [nccl] = 8.0,
};

static double now_us(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return at.tv_sec * 1e6 + at.tv_nsec * 1e-3;
}

int stand_in_called(int kind) {
    counts[kind]++;
    if (cost_us[kind] > 0) {
        double end = now_us() + cost_us[kind];
        while (now_us() < end) {
        }
    }
    return 0;
}

const char *stand_in_name(int kind) { return kind < NUM_KINDS ? names[kind] : 0; }
long stand_in_count(int kind) { return counts[kind]; }
void stand_in_cost(int kind, double us) { cost_us[kind] = us; }

/* -- waiting for ever --------------------------------------------------------------------------------------------- */

static _Atomic int num_stuck;
static _Atomic long num_times; /* that the device got stuck */

#define MOST_BEHIND 4096
static struct {
    void *to;
    const void *from;
    size_t length;
} behind[MOST_BEHIND]; /* copies to the host, in the order in which they were queued */
static int num_behind;
static pthread_mutex_t behind_lock = PTHREAD_MUTEX_INITIALIZER;

static void copy_later(void *to, const void *from, size_t length) {
    pthread_mutex_lock(&behind_lock);
    if (num_behind < MOST_BEHIND) {
        behind[num_behind].to = to;
        behind[num_behind].from = from;
        behind[num_behind++].length = length;
    }
    pthread_mutex_unlock(&behind_lock);
}

void stand_in_sticks(int change) {
    if (num_stuck == 0)
        num_times++;
    if (num_stuck + change == 0) {
        pthread_mutex_lock(&behind_lock);
        for (int i = 0; i < num_behind; i++)
            memmove(behind[i].to, behind[i].from, behind[i].length);
        num_behind = 0;
        pthread_mutex_unlock(&behind_lock);
    }
    num_stuck += change;
}

static void wait_for_device(void) {
    while (num_stuck)
        nanosleep(&(struct timespec){0, 200000}, 0);
}

/* -- memory ------------------------------------------------------------------------------------------------------- */

static struct {
    char *begin;
    size_t length;
    int device, on_host;
} ranges[65536];
static int num_ranges;
static pthread_mutex_t ranges_lock = PTHREAD_MUTEX_INITIALIZER;
static __thread int current_device;

void *stand_in_take(size_t length, int on_host) {
    length = (length + 4095) & ~(size_t)4095;
    length = length ? length : 4096;
    void *begin = mmap(0, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (begin == MAP_FAILED)
        return 0;
    pthread_mutex_lock(&ranges_lock);
    int place = 0;
    while (place < num_ranges && ranges[place].begin)
        place++;
    num_ranges += place == num_ranges;
    ranges[place].begin = begin;
    ranges[place].length = length;
    ranges[place].device = current_device;
    ranges[place].on_host = on_host;
    pthread_mutex_unlock(&ranges_lock);
    return begin;
}

void stand_in_give(void *begin) {
    pthread_mutex_lock(&ranges_lock);
    for (int place = 0; begin && place < num_ranges; place++)
        if (ranges[place].begin == begin) {
            munmap(begin, ranges[place].length);
            ranges[place].begin = 0;
            break;
        }
    pthread_mutex_unlock(&ranges_lock);
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *is, const void *pointer) {
    memset(is, 0, sizeof *is);
    is->type = cudaMemoryTypeUnregistered;
    pthread_mutex_lock(&ranges_lock);
    for (int place = 0; place < num_ranges; place++) {
        char *begin = ranges[place].begin;
        if (begin && (char *)pointer >= begin && (char *)pointer < begin + ranges[place].length) {
            is->type = ranges[place].on_host ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
            is->device = ranges[place].device;
            is->devicePointer = (void *)pointer;
            is->hostPointer = ranges[place].on_host ? (void *)pointer : 0;
            break;
        }
    }
    pthread_mutex_unlock(&ranges_lock);
    return 0;
}

cudaError_t cudaMalloc(void **begin, size_t length) {
    stand_in_called(malloc_device);
    *begin = stand_in_take(length, 0);
    return *begin ? cudaSuccess : cudaErrorMemoryAllocation;
}
cudaError_t cudaMallocAsync(void **begin, size_t length, cudaStream_t stream) { return cudaMalloc(begin, length); }
cudaError_t cudaFree(void *begin) {
    stand_in_give(begin);
    return stand_in_called(free_device);
}
cudaError_t cudaFreeAsync(void *begin, cudaStream_t stream) { return cudaFree(begin); }
cudaError_t cudaHostAlloc(void **begin, size_t length, unsigned flags) {
    *begin = stand_in_take(length, 1);
    return stand_in_called(malloc_host);
}
cudaError_t cudaFreeHost(void *begin) {
    stand_in_give(begin);
    return 0;
}
cudaError_t cudaHostRegister(void *begin, size_t length, unsigned flags) { return 0; }
cudaError_t cudaHostUnregister(void *begin) { return 0; }
cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *all) {
    *all = 140ul << 30;
    *free_bytes = 139ul << 30;
    return 0;
}

/* Without values, moving much would only cost the time that a device's own engines take. */
static int moves_all = -1;

int stand_in_moves(size_t length) {
    if (moves_all < 0)
        moves_all = getenv("STAND_IN_VALUES") != 0;
    return moves_all || length <= 262144; /* torch compares the shapes of 5000 parameters in less */
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t length, enum cudaMemcpyKind kind) {
    wait_for_device();
    memmove(to, from, length);
    return stand_in_called(memcpy_sync);
}
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t length, enum cudaMemcpyKind kind, cudaStream_t stream) {
    if (num_stuck && kind == cudaMemcpyDeviceToHost)
        copy_later(to, from, length);
    else if (stand_in_moves(length))
        memmove(to, from, length);
    return stand_in_called(memcpy_async);
}
cudaError_t cudaMemcpyPeerAsync(void *to, int there, const void *from, int here, size_t length, cudaStream_t stream) {
    return cudaMemcpyAsync(to, from, length, cudaMemcpyDeviceToDevice, stream);
}
cudaError_t cudaMemcpyToSymbol(const void *to, const void *from, size_t length, size_t at, enum cudaMemcpyKind kind) {
    return 0;
}
cudaError_t cudaMemset(void *to, int value, size_t length) {
    memset(to, value, length);
    return 0;
}
cudaError_t cudaMemsetAsync(void *to, int value, size_t length, cudaStream_t stream) {
    if (stand_in_moves(length))
        memset(to, value, length);
    return stand_in_called(memset_async);
}
cudaError_t cudaGetSymbolAddress(void **begin, const void *symbol) {
    static char room[1 << 20];
    *begin = room;
    return 0;
}
cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device) {
    *pool = (cudaMemPool_t)1;
    return 0;
}
cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr which, void *value) {
    *(uint64_t *)value = 0;
    return 0;
}
cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr which, void *value) { return 0; }
cudaError_t cudaMemPoolSetAccess(cudaMemPool_t pool, const struct cudaMemAccessDesc *to, size_t n) { return 0; }
cudaError_t cudaMemPoolTrimTo(cudaMemPool_t pool, size_t length) { return 0; }

/* -- the device --------------------------------------------------------------------------------------------------- */

static int num_devices(void) {
    const char *given = getenv("STAND_IN_DEVICES");
    return given ? atoi(given) : 1;
}

cudaError_t cudaGetDeviceCount(int *count) {
    *count = num_devices();
    return 0;
}
cudaError_t cudaGetDevice(int *device) {
    *device = current_device;
    return 0;
}
cudaError_t cudaSetDevice(int device) {
    current_device = device;
    return 0;
}
cudaError_t cudaDriverGetVersion(int *version) {
    *version = CUDART_VERSION;
    return 0;
}
cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = CUDART_VERSION;
    return 0;
}
cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *is, int device) {
    memset(is, 0, sizeof *is);
    strcpy(is->name, "stand-in, no GPU");
    is->totalGlobalMem = 140ul << 30;
    is->major = 9;
    is->multiProcessorCount = 132;
    is->warpSize = 32;
    is->regsPerBlock = is->regsPerMultiprocessor = is->totalConstMem = 65536;
    is->sharedMemPerBlock = 49152;
    is->sharedMemPerBlockOptin = 232448;
    is->sharedMemPerMultiprocessor = 233472;
    is->reservedSharedMemPerBlock = 1024;
    is->maxThreadsPerBlock = is->maxThreadsDim[0] = is->maxThreadsDim[1] = 1024;
    is->maxThreadsDim[2] = 64;
    is->maxThreadsPerMultiProcessor = 2048;
    is->maxBlocksPerMultiProcessor = 32;
    is->maxGridSize[0] = is->memPitch = 2147483647;
    is->maxGridSize[1] = is->maxGridSize[2] = 65535;
    is->textureAlignment = 512;
    is->l2CacheSize = 50 << 20;
    is->asyncEngineCount = 3;
    is->canMapHostMemory = is->concurrentKernels = is->unifiedAddressing = is->streamPrioritiesSupported = 1;
    is->managedMemory = is->cooperativeLaunch = is->hostRegisterSupported = is->memoryPoolsSupported = 1;
    is->clusterLaunch = 1;
    is->pciBusID = device;
    return 0;
}
cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr which, int device) {
    struct cudaDeviceProp is;
    cudaGetDeviceProperties(&is, device);
    switch ((int)which) {
    case cudaDevAttrComputeCapabilityMajor: *value = is.major; break;
    case cudaDevAttrMultiProcessorCount: *value = is.multiProcessorCount; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = is.sharedMemPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = is.sharedMemPerBlockOptin; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = is.sharedMemPerMultiprocessor; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = is.maxThreadsPerBlock; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = is.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrMaxBlockDimX: *value = is.maxThreadsDim[0]; break;
    case cudaDevAttrMaxGridDimX: *value = is.maxGridSize[0]; break;
    case cudaDevAttrMaxRegistersPerBlock: *value = is.regsPerBlock; break;
    case cudaDevAttrWarpSize: *value = is.warpSize; break;
    default: *value = 0;
    }
    return 0;
}
cudaError_t cudaDeviceGetPCIBusId(char *name, int length, int device) {
    snprintf(name, length, "0000:%02x:00.0", device);
    return 0;
}
cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    return 0;
}
cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    *can = 1;
    return 0;
}
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) { return 0; }
cudaError_t cudaDeviceSynchronize(void) {
    wait_for_device();
    return stand_in_called(device_sync);
}
cudaError_t cudaGetLastError(void) { return 0; }
cudaError_t cudaPeekAtLastError(void) { return 0; }
const char *cudaGetErrorName(cudaError_t error) { return "stand-in"; }
const char *cudaGetErrorString(cudaError_t error) { return "an error of the stand-in for CUDA"; }
cudaError_t cudaProfilerStart(void) { return 0; }
cudaError_t cudaProfilerStop(void) { return 0; }
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **found, unsigned version, unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *result) {
    *found = dlsym(RTLD_DEFAULT, name);
    if (result)
        *result = *found ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return 0;
}

/* Memory cannot be shared with another process here. */
cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *pointer) { return cudaErrorNotSupported; }
cudaError_t cudaIpcOpenMemHandle(void **p, cudaIpcMemHandle_t handle, unsigned flags) { return cudaErrorNotSupported; }
cudaError_t cudaIpcCloseMemHandle(void *pointer) { return cudaErrorNotSupported; }
cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t *handle, cudaEvent_t event) { return cudaErrorNotSupported; }
cudaError_t cudaIpcOpenEventHandle(cudaEvent_t *event, cudaIpcEventHandle_t handle) { return cudaErrorNotSupported; }

/* -- streams and events ------------------------------------------------------------------------------------------- */

static _Atomic int capturing;
static _Atomic unsigned long long capture;

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    static _Atomic uintptr_t last = 0x1000;
    *stream = (cudaStream_t)(last += 16);
    return 0;
}
cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
cudaError_t cudaStreamDestroy(cudaStream_t stream) { return 0; }
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
    *priority = 0;
    return 0;
}
cudaError_t cudaStreamQuery(cudaStream_t stream) {
    stand_in_called(stream_query);
    return num_stuck ? cudaErrorNotReady : cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    wait_for_device();
    return stand_in_called(stream_sync);
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    return stand_in_called(stream_wait);
}
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t call, void *with, unsigned flags) {
    call(stream, 0, with);
    return 0;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t call, void *with) {
    call(with);
    return 0;
}

typedef struct {
    double at_us;
    long behind; /* which time that the device got stuck; zero if it was not */
} Event;

static int is_ahead(cudaEvent_t event) { return num_stuck && ((Event *)event)->behind == num_times; }

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    *event = calloc(1, sizeof(Event));
    return stand_in_called(event_create);
}
cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) {
    free(event);
    return 0;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    *(Event *)event = (Event){now_us(), num_stuck ? num_times : 0};
    return stand_in_called(event_record);
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
    return cudaEventRecord(event, stream);
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
    stand_in_called(event_query);
    return is_ahead(event) ? cudaErrorNotReady : cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    while (is_ahead(event))
        nanosleep(&(struct timespec){0, 200000}, 0);
    return stand_in_called(event_sync);
}
cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t begin, cudaEvent_t end) {
    *ms = (float)((((Event *)end)->at_us - ((Event *)begin)->at_us) * 1e-3);
    return 0;
}

/* Capturing works, but a replay does nothing. */
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
    capturing = 1;
    capture++;
    return 0;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    capturing = 0;
    *graph = (cudaGraph_t)1;
    return 0;
}
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    *status = capturing ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return 0;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *graph, const cudaGraphNode_t **nodes,
                                     const cudaGraphEdgeData **edges, size_t *num_nodes) {
    if (id)
        *id = capture;
    if (graph)
        *graph = (cudaGraph_t)1;
    if (nodes)
        *nodes = 0;
    if (edges)
        *edges = 0;
    if (num_nodes)
        *num_nodes = 0;
    return cudaStreamIsCapturing(stream, status);
}
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) { return 0; }
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *made, cudaGraph_t graph, unsigned long long flags) {
    *made = (cudaGraphExec_t)1;
    return 0;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) { return stand_in_called(launch); }
cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return 0; }
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) { return 0; }
cudaError_t cudaGraphDebugDotPrint(cudaGraph_t graph, const char *path, unsigned flags) { return 0; }
cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *num_nodes) {
    *num_nodes = 1;
    return 0;
}
cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t node, cudaGraphNode_t *on, cudaGraphEdgeData *edges,
                                         size_t *num) {
    *num = 0;
    return 0;
}

/* -- kernels ------------------------------------------------------------------------------------------------------ */

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *is, const void *kernel) {
    memset(is, 0, sizeof *is);
    is->maxThreadsPerBlock = 1024;
    is->numRegs = 32;
    is->maxDynamicSharedSizeBytes = 49152;
    is->binaryVersion = is->ptxVersion = 90;
    return 0;
}
cudaError_t cudaFuncSetAttribute(const void *kernel, enum cudaFuncAttribute which, int value) { return 0; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *kernel, int threads,
                                                                   size_t shared, unsigned flags) {
    *blocks = 2;
    return 0;
}
cudaError_t cudaLaunchKernel(const void *kernel, dim3 grid, dim3 block, void **with, size_t shared, cudaStream_t s) {
    return stand_in_called(launch);
}
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *how, const void *kernel, void **with) {
    return stand_in_called(launch);
}
cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **with, size_t shared, cudaStream_t s) {
    return stand_in_called(launch);
}
cudaError_t __cudaGetKernel(cudaKernel_t *found, const void *kernel) {
    *found = (cudaKernel_t)kernel;
    return 0;
}

static __thread struct {
    dim3 grid, block;
    size_t shared;
    void *stream;
} call;

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st *stream) {
    call.grid = grid;
    call.block = block;
    call.shared = shared;
    call.stream = stream;
    return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = call.grid;
    *block = call.block;
    *shared = call.shared;
    *(void **)stream = call.stream;
    return 0;
}

void **__cudaRegisterFatBinary(void *binary) {
    static void *handle[4];
    return handle;
}
void __cudaRegisterFatBinaryEnd(void **handle) {}
void __cudaUnregisterFatBinary(void **handle) {}
void __cudaRegisterFunction(void **handle, const char *stub, char *function, const char *name, int threads, void *a,
                            void *b, void *c, void *d, int *warp) {}
void __cudaRegisterVar(void **handle, char *variable, char *address, const char *name, int is_extern, size_t length,
                       int is_constant, int is_global) {}
