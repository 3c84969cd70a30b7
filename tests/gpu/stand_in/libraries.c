/* A stand-in for what torch's CUDA build calls besides the runtime: the driver, cuBLAS, and NCCL among one rank.

   None of these takes part in computing: kernels.py does, where values matter. NCCL's collectives copy what a rank would
   get from itself, which is all there is at world size 1. Calls are declared without their arguments where none is used. */
#include "stand_in.h"

#include <stdlib.h>
#include <string.h>

/* -- the driver --------------------------------------------------------------------------------------------------- */

#define DRIVER_CALLS(X)                                                                                                \
    X(cuAm) X(cuBr) X(cuBx) X(cuCG) X(cuCtxFromGreenCtx) X(cuCtxPopCurrent) X(cuCtxPushCurrent)                        \
    X(cuCtxSetCurrent) X(cuDevResourceGenerateDesc) X(cuDevSmResourceSplitByCount) X(cuDeviceGet)                      \
    X(cuDeviceGetAttribute) X(cuDeviceGetDevResource) X(cuDeviceGetUuid) X(cuDevicePrimaryCtxRetain) X(cuDp)           \
    X(cuEF) X(cuEal) X(cuFAo) X(cuFZ) X(cuFc) X(cuFf) X(cuFj) X(cuFuncGetAttribute) X(cuFuncSetAttribute)              \
    X(cuFuncSetCacheConfig) X(cuGS) X(cuGreenCtxCreate) X(cuGreenCtxDestroy) X(cuGreenCtxStreamCreate)                 \
    X(cuInit) X(cuIx) X(cuJo) X(cuKC) X(cuKy) X(cuLaunchCooperativeKernel) X(cuLaunchKernel)                           \
    X(cuLinkAddData_v2) X(cuLinkComplete) X(cuLinkCreate_v2) X(cuMemAddressFree) X(cuMemAddressReserve)                \
    X(cuMemCreate) X(cuMemExportToShareableHandle) X(cuMemGetAddressRange_v2) X(cuMemGetAllocationGranularity)         \
    X(cuMemGetAllocationPropertiesFromHandle) X(cuMemImportFromShareableHandle) X(cuMemMap) X(cuMemRelease)            \
    X(cuMemRetainAllocationHandle) X(cuMemSetAccess) X(cuMemUnmap) X(cuModuleGetFunction) X(cuModuleLoad)              \
    X(cuModuleLoadData) X(cuModuleLoadDataEx) X(cuModuleUnload) X(cuMulticastAddDevice) X(cuMulticastBindMem)          \
    X(cuMulticastCreate) X(cuMulticastUnbind) X(cuNM) X(cuOC) X(cuOccupancyMaxActiveBlocksPerMultiprocessor)           \
    X(cuPc) X(cuPeYt) X(cuPointerGetAttribute) X(cuQJ) X(cuQQ) X(cuQz) X(cuRO) X(cuTb)                                 \
    X(cuTensorMapEncodeTiled) X(cuUWT) X(cuUX) X(cuUab) X(cuUuWUUUUwwwC) X(cuVfjT) X(cuVj) X(cuWKV) X(cuWN)            \
    X(cuZfr) X(cuZfs)

#define DOES_NOTHING(name)                                                                                             \
    int name() { return 0; }
DRIVER_CALLS(DOES_NOTHING)

int cuDriverGetVersion(int *version) {
    *version = 13000;
    return 0;
}
int cuDeviceGetCount(int *count) {
    *count = 1;
    return 0;
}
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    *flags = 0;
    *active = 1;
    return 0;
}
int cuCtxGetCurrent(void **context) {
    *context = (void *)1;
    return 0;
}
int cuGetErrorName(int error, const char **name) {
    *name = "stand-in";
    return 0;
}
int cuGetErrorString(int error, const char **text) {
    *text = "an error of the stand-in for CUDA";
    return 0;
}

/* -- cuBLAS ------------------------------------------------------------------------------------------------------- */

#define PRODUCTS(X)                                                                                                    \
    X(cublasCdotc_v2) X(cublasCdotu_v2) X(cublasCgemmStridedBatched) X(cublasCgemm_v2) X(cublasCgemv_v2)               \
    X(cublasDdot_v2) X(cublasDgemmStridedBatched) X(cublasDgemm_v2) X(cublasDgemv_v2) X(cublasDotEx)                   \
    X(cublasGemmEx) X(cublasGemmStridedBatchedEx) X(cublasSdot_v2) X(cublasSgemmEx)                                    \
    X(cublasSgemmStridedBatched) X(cublasSgemm_v2) X(cublasSgemv_v2) X(cublasZdotc_v2) X(cublasZdotu_v2)               \
    X(cublasZgemmStridedBatched) X(cublasZgemm_v2) X(cublasZgemv_v2) X(cublasLtMatmul)

#define SETTINGS(X)                                                                                                    \
    X(cublasDestroy_v2) X(cublasSetStream_v2) X(cublasSetWorkspace_v2) X(cublasSetMathMode)                            \
    X(cublasSetPointerMode_v2) X(cublasLtMatmulDescSetAttribute) X(cublasLtMatmulPreferenceSetAttribute)               \
    X(cublasLtMatrixLayoutSetAttribute) X(cublasCgelsBatched) X(cublasCgeqrfBatched) X(cublasCgetrfBatched)            \
    X(cublasCgetrsBatched) X(cublasCtrsmBatched) X(cublasCtrsm_v2) X(cublasDgelsBatched) X(cublasDgeqrfBatched)        \
    X(cublasDgetrfBatched) X(cublasDgetrsBatched) X(cublasDtrsmBatched) X(cublasDtrsm_v2) X(cublasSgelsBatched)        \
    X(cublasSgeqrfBatched) X(cublasSgetrfBatched) X(cublasSgetrsBatched) X(cublasStrsmBatched)                         \
    X(cublasStrsm_v2) X(cublasZgelsBatched) X(cublasZgeqrfBatched) X(cublasZgetrfBatched)                              \
    X(cublasZgetrsBatched) X(cublasZtrsmBatched) X(cublasZtrsm_v2)

#define DESCRIPTORS(X)                                                                                                 \
    X(cublasLtMatmulDesc) X(cublasLtMatmulPreference) X(cublasLtMatrixLayout)

#define IS_A_PRODUCT(name)                                                                                             \
    int name() { return stand_in_called(matmul); }
#define COMES_AND_GOES(name)                                                                                           \
    int name##Create(void **made) { return (*made = calloc(1, 8)) == 0; }                                              \
    int name##Destroy(void *made) {                                                                                    \
        free(made);                                                                                                    \
        return 0;                                                                                                      \
    }
PRODUCTS(IS_A_PRODUCT)
SETTINGS(DOES_NOTHING)
DESCRIPTORS(COMES_AND_GOES)

int cublasCreate_v2(void **handle) { return (*handle = calloc(1, 64)) == 0; }
int cublasGetMathMode(void *handle, int *mode) { return *mode = 0; }
int cublasGetPointerMode_v2(void *handle, int *mode) { return *mode = 0; }
int cublasLtMatmulAlgoGetHeuristic(void *handle, void *what, void *a, void *b, void *c, void *d, void *preference,
                                   int wanted, void *found, int *num_found) {
    memset(found, 0, 96); /* one cublasLtMatmulHeuristicResult_t */
    *num_found = 1;
    return 0;
}

/* -- NCCL --------------------------------------------------------------------------------------------------------- */

typedef struct {
    int rank, size;
} Comm;
typedef struct {
    char bytes[128];
} Id;

static int make(Comm **comm, int rank, int size) {
    *comm = malloc(sizeof(Comm));
    **comm = (Comm){rank, size};
    return 0;
}

int ncclGetVersion(int *version) {
    *version = 22809;
    return 0;
}
int ncclGetUniqueId(Id *id) {
    memset(id, 1, sizeof *id);
    return 0;
}
int ncclCommInitRank(Comm **comm, int size, Id id, int rank) { return make(comm, rank, size); }
int ncclCommInitRankConfig(Comm **comm, int size, Id id, int rank, void *how) { return make(comm, rank, size); }
int ncclCommInitRankScalable(Comm **comm, int size, int rank, int num, Id *ids, void *how) {
    return make(comm, rank, size);
}
int ncclCommSplit(Comm *comm, int color, int key, Comm **made, void *how) { return make(made, comm->rank, comm->size); }
int ncclCommCount(Comm *comm, int *size) {
    *size = comm->size;
    return 0;
}
int ncclCommUserRank(Comm *comm, int *rank) {
    *rank = comm->rank;
    return 0;
}
int ncclCommGetAsyncError(Comm *comm, int *error) { return *error = 0; }
const char *ncclGetErrorString(int error) { return "an error of the stand-in for NCCL"; }
const char *ncclGetLastError(Comm *comm) { return ncclGetErrorString(0); }
int ncclRedOpCreatePreMulSum(int *op) { return (*op = 5) * 0; }
int ncclMemAlloc(void **begin, size_t length) { return (*begin = stand_in_take(length, 0)) == 0; }
int ncclMemFree(void *begin) {
    stand_in_give(begin);
    return 0;
}

static int copied(const void *from, void *to, size_t count, int dtype) {
    static const int lengths[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    if (from != to)
        memmove(to, from, count * lengths[dtype]);
    return stand_in_called(nccl);
}

int ncclAllReduce(const void *from, void *to, size_t n, int dtype) { return copied(from, to, n, dtype); }
int ncclReduce(const void *from, void *to, size_t n, int dtype) { return copied(from, to, n, dtype); }
int ncclBroadcast(const void *from, void *to, size_t n, int dtype) { return copied(from, to, n, dtype); }
int ncclAllGather(const void *from, void *to, size_t n, int dtype) { return copied(from, to, n, dtype); }
int ncclReduceScatter(const void *from, void *to, size_t n, int dtype) { return copied(from, to, n, dtype); }
int ncclAlltoAll(const void *from, void *to, size_t n, int dtype) { return copied(from, to, n, dtype); }

#define NCCL_CALLS(X)                                                                                                  \
    X(ncclGroupStart) X(ncclGroupEnd) X(ncclGroupSimulateEnd) X(ncclCommDestroy) X(ncclCommAbort)                      \
    X(ncclCommFinalize) X(ncclCommRegister) X(ncclCommDeregister) X(ncclCommWindowRegister)                            \
    X(ncclCommWindowDeregister) X(ncclRedOpDestroy)
NCCL_CALLS(DOES_NOTHING)
