/* A stand-in for what torch's CUDA build calls besides the runtime and NCCL: the driver and cuBLAS.

   Neither takes part in computing: stand_in_torch.py does, where values matter. Calls are declared without their
   arguments where none is used. */
#include "stand_in.h"

#include <stdlib.h>
#include <string.h>

/* -- the driver --------------------------------------------------------------------------------------------------- */

#define DRIVER_CALLS(X)                                                                                                \
    X(cuCtxFromGreenCtx) X(cuCtxPopCurrent) X(cuCtxPushCurrent) X(cuCtxSetCurrent) X(cuDevResourceGenerateDesc)        \
    X(cuDevSmResourceSplitByCount) X(cuDeviceGet) X(cuDeviceGetAttribute) X(cuDeviceGetDevResource)                    \
    X(cuDeviceGetUuid) X(cuDevicePrimaryCtxRetain) X(cuFuncGetAttribute) X(cuFuncSetAttribute)                         \
    X(cuFuncSetCacheConfig) X(cuGreenCtxCreate) X(cuGreenCtxDestroy) X(cuGreenCtxStreamCreate) X(cuInit)               \
    X(cuLaunchCooperativeKernel) X(cuLaunchKernel) X(cuLinkAddData_v2) X(cuLinkComplete) X(cuLinkCreate_v2)            \
    X(cuMemAddressFree) X(cuMemAddressReserve) X(cuMemCreate) X(cuMemExportToShareableHandle)                          \
    X(cuMemGetAddressRange_v2) X(cuMemGetAllocationGranularity) X(cuMemGetAllocationPropertiesFromHandle)              \
    X(cuMemImportFromShareableHandle) X(cuMemMap) X(cuMemRelease) X(cuMemRetainAllocationHandle) X(cuMemSetAccess)     \
    X(cuMemUnmap) X(cuModuleGetFunction) X(cuModuleLoad) X(cuModuleLoadData) X(cuModuleLoadDataEx) X(cuModuleUnload)   \
    X(cuMulticastAddDevice) X(cuMulticastBindMem) X(cuMulticastCreate) X(cuMulticastUnbind)                            \
    X(cuOccupancyMaxActiveBlocksPerMultiprocessor) X(cuPointerGetAttribute) X(cuTensorMapEncodeTiled)

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
