/* What the parts of the stand-in share: the kinds of calls that are counted. */
#include <stddef.h>

#define KINDS(X)                                                                                                       \
    X(launch) X(memcpy_async) X(memcpy_sync) X(memset_async) X(event_create) X(event_record) X(event_query)            \
    X(event_sync) X(stream_wait) X(stream_sync) X(stream_query) X(device_sync) X(malloc_device) X(free_device)         \
    X(malloc_host) X(matmul) X(nccl)

enum {
#define KIND(kind) kind,
    KINDS(KIND)
#undef KIND
    NUM_KINDS
};

int stand_in_called(int kind); /* counts it, takes its time, and returns zero: that all went well */
int stand_in_moves(size_t length); /* whether so much memory is copied, or only counted */
void *stand_in_take(size_t length, int on_host);
void stand_in_give(void *begin);
void stand_in_sticks(int change); /* a collective more, or fewer, that holds up the device for ever */
