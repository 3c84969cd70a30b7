/* A stand-in for NCCL: ranks are processes of this host, which meet in shared memory.

   A collective is over when the call returns, so a rank waits within it for the others: on the host, where on a GPU its
   stream would. What ranks ask for is compared, and an error where they ask for different things; NCCL would wait for
   ever, or mix up what they send. For a rank that is gone, or that does not come within STAND_IN_PATIENCE_S, the host no
   longer waits but the device does, as on a GPU: for ever, or until the communicator is aborted. */
#define _GNU_SOURCE
#include "stand_in.h"

#include <fcntl.h>
/* of numbers of two bytes NCCL wants no more than their names: their headers want others that nobody here needs */
#define __CUDA_FP16_H__
#define __CUDA_BF16_H__
#define __CUDA_FP8_H__
#include <nccl.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define MOST_RANKS 16
#define CHUNK (1ul << 20) /* bytes that a rank shows at a time */
#define MOST_SCALED 64
#define STUCK 1000 /* in place of an ncclResult_t: the call goes well, and the device waits for ever */

typedef struct {
    _Atomic int pid;       /* zero until it has come */
    _Atomic uint64_t came; /* how many meetings it has come to */
    _Atomic int has_left;
    char asks[2][96]; /* what it calls, and called before: compared with what the others call */
} Seat;

typedef struct {
    _Atomic uint64_t sent, taken; /* chunks, from one rank to one other */
    size_t length;                /* of the whole message */
    char chunk[CHUNK];
} Mail;

typedef struct {
    Seat seats[MOST_RANKS];
    char shown[MOST_RANKS][CHUNK];
    Mail mail[MOST_RANKS][MOST_RANKS]; /* sparse: pages that nobody writes do not exist */
} Room;

struct ncclComm {
    int rank, size;
    uint64_t num_meetings;
    Room *room;
    _Atomic int aborted;
    _Atomic int broken; /* an ncclResult_t, or STUCK */
    double factors[MOST_SCALED];
    int num_factors;
};

/* -- meeting ------------------------------------------------------------------------------------------------------ */

static ncclResult_t look_around(ncclComm_t comm) {
    if (comm->aborted)
        return ncclInternalError;
    for (int rank = 0; rank < comm->size; rank++) {
        Seat *seat = &comm->room->seats[rank];
        if (seat->has_left || (seat->pid && kill(seat->pid, 0)))
            return ncclRemoteError;
    }
    return ncclSuccess;
}

static double seconds(void) {
    struct timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return at.tv_sec + at.tv_nsec * 1e-9;
}

static double patience(void) {
    const char *given = getenv("STAND_IN_PATIENCE_S");
    return given ? atof(given) : 600;
}

/* The others will not come, or not any more. */
static int without_them(ncclComm_t comm, ncclResult_t why) {
    if (comm->broken)
        return comm->broken;
    if (!comm->aborted) {
        stand_in_sticks(1);
        return comm->broken = STUCK;
    }
    return comm->broken = why;
}

/* Waits until a condition holds, or says why it never will. */
#define AWAIT(comm, condition)                                                                                         \
    double until = 0;                                                                                                  \
    for (long looks = 0; !(condition); looks++) {                                                                      \
        if (looks < 200) {                                                                                             \
            sched_yield();                                                                                             \
            continue;                                                                                                  \
        }                                                                                                              \
        until = until ? until : seconds() + patience();                                                                \
        nanosleep(&(struct timespec){0, 50000}, 0);                                                                    \
        ncclResult_t why = looks % 100 ? ncclSuccess : look_around(comm);                                              \
        if ((why || seconds() > until) && !(condition))                                                                \
            return without_them(comm, why);                                                                            \
    }

#define CALL(what)                                                                                                     \
    do {                                                                                                               \
        int found = (what);                                                                                   \
        if (found)                                                                                                     \
            return found;                                                                                              \
    } while (0)

static int meet(ncclComm_t comm) {
    uint64_t now = ++comm->num_meetings;
    comm->room->seats[comm->rank].came = now;
    for (int rank = 0; rank < comm->size; rank++) {
        AWAIT(comm, comm->room->seats[rank].came >= now);
    }
    return ncclSuccess;
}

/* All ranks say what they call, and see what the others do. */
static int agree(ncclComm_t comm, const char *asks) {
    Seat *seats = comm->room->seats;
    int turn = comm->num_meetings % 2; /* who reads this one is at most a meeting behind */
    strncpy(seats[comm->rank].asks[turn], asks, sizeof seats->asks[turn] - 1);
    CALL(meet(comm));
    for (int rank = 0; rank < comm->size; rank++)
        if (strcmp(seats[rank].asks[turn], asks)) {
            fprintf(stderr, "stand-in for NCCL: rank %d calls %s, rank %d calls %s\n", comm->rank, asks, rank,
                    seats[rank].asks[turn]);
            return comm->broken = ncclInvalidUsage;
        }
    return ncclSuccess;
}

/* -- arithmetic --------------------------------------------------------------------------------------------------- */

static const size_t lengths[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};

static float from_bf16(uint16_t bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}
static uint16_t to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffff) > 0x7f800000)
        return (bits >> 16) | 64;
    return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}
static float from_f16(uint16_t bits) {
    _Float16 value;
    memcpy(&value, &bits, 2);
    return (float)value;
}
static uint16_t to_f16(float value) {
    _Float16 low = (_Float16)value;
    uint16_t bits;
    memcpy(&bits, &low, 2);
    return bits;
}
#define AS_IT_IS(value) (value)

/* Rank by rank, always in the same order. `factor` is one but for averages and scaled sums: NCCL multiplies with it in the
   numbers' own type, before it adds. */
#define REDUCE(type, wide, load, store, is_float)                                                                      \
    for (size_t i = 0; i < n; i++) {                                                                                   \
        wide total = load(((const type *)room->shown[0])[i]);                                                          \
        if (is_float)                                                                                                  \
            total = load(store(total * factor));                                                                       \
        for (int rank = 1; rank < comm->size; rank++) {                                                                \
            wide next = load(((const type *)room->shown[rank])[i]);                                                    \
            if (is_float)                                                                                              \
                next = load(store(next * factor));                                                                     \
            switch ((int)op) {                                                                                         \
            case ncclProd: total *= next; break;                                                                       \
            case ncclMax: total = next > total ? next : total; break;                                                  \
            case ncclMin: total = next < total ? next : total; break;                                                  \
            default: total += next;                                                                                    \
            }                                                                                                          \
        }                                                                                                              \
        if (op == ncclAvg && !is_float)                                                                                \
            total /= comm->size;                                                                                       \
        ((type *)to)[i] = store(total);                                                                                \
    }                                                                                                                  \
    break

static void reduce_shown(ncclComm_t comm, void *to, size_t n, ncclDataType_t dtype, ncclRedOp_t op) {
    Room *room = comm->room;
    double factor = op == ncclAvg ? 1.0 / comm->size : 1.0;
    if (op > ncclAvg)
        factor = comm->factors[op - ncclAvg - 1];
    switch (dtype) {
    case ncclInt8: REDUCE(int8_t, int64_t, AS_IT_IS, AS_IT_IS, 0);
    case ncclUint8: REDUCE(uint8_t, uint64_t, AS_IT_IS, AS_IT_IS, 0);
    case ncclInt32: REDUCE(int32_t, int64_t, AS_IT_IS, AS_IT_IS, 0);
    case ncclUint32: REDUCE(uint32_t, uint64_t, AS_IT_IS, AS_IT_IS, 0);
    case ncclInt64: REDUCE(int64_t, int64_t, AS_IT_IS, AS_IT_IS, 0);
    case ncclUint64: REDUCE(uint64_t, uint64_t, AS_IT_IS, AS_IT_IS, 0);
    case ncclFloat16: REDUCE(uint16_t, float, from_f16, to_f16, 1);
    case ncclBfloat16: REDUCE(uint16_t, float, from_bf16, to_bf16, 1);
    case ncclFloat32: REDUCE(float, float, AS_IT_IS, AS_IT_IS, 1);
    case ncclFloat64: REDUCE(double, double, AS_IT_IS, AS_IT_IS, 1);
    default: fprintf(stderr, "stand-in for NCCL: cannot add up numbers of type %d\n", dtype), abort();
    }
}

/* -- what may be called ------------------------------------------------------------------------------------------- */

typedef enum { ALL_REDUCE, REDUCE, BROADCAST, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL, GATHER, SCATTER, SEND, RECV } Kind;
static const char *kinds[] = {"all_reduce", "reduce",     "broadcast", "all_gather", "reduce_scatter",
                              "all_to_all", "gather",     "scatter",   "send",       "recv"};

typedef struct {
    Kind kind;
    const char *from;
    char *to;
    size_t n;
    ncclDataType_t dtype;
    ncclRedOp_t op;
    int root; /* or the peer */
    ncclComm_t comm;
    uint64_t num_done; /* of a message: bytes */
} Call;

/* One part of what every rank has for rank `to_rank` (or for all): shown, met over, and read by those it is for. */
static int pass_on(Call *call, const char *from, int shows, int reads, int reduces) {
    ncclComm_t comm = call->comm;
    size_t bytes = call->n * lengths[call->dtype];
    for (size_t at = 0; at < bytes; at += CHUNK) {
        size_t length = bytes - at < CHUNK ? bytes - at : CHUNK;
        if (shows)
            memcpy(comm->room->shown[comm->rank], from + at, length);
        CALL(meet(comm));
        if (reads && reduces)
            reduce_shown(comm, call->to + at, length / lengths[call->dtype], call->dtype, call->op);
        for (int rank = 0; reads && !reduces && rank < comm->size; rank++) {
            int is_one = call->kind == BROADCAST || call->kind == SCATTER; /* what only the root has shown */
            if (!is_one || rank == call->root)
                memcpy(call->to + (is_one ? 0 : rank * bytes) + at, comm->room->shown[rank], length);
        }
        CALL(meet(comm));
    }
    return ncclSuccess;
}

static int take_part(Call *call) {
    ncclComm_t comm = call->comm;
    size_t bytes = call->n * lengths[call->dtype];
    int is_root = comm->rank == call->root;
    char asks[96];
    if (comm->broken)
        return comm->broken;
    snprintf(asks, sizeof asks, "%s of %zu numbers of type %d, op %d, root %d", kinds[call->kind], call->n, call->dtype,
             call->op > ncclAvg ? ncclAvg + 1 : call->op, call->root);
    if (comm->size > 1)
        CALL(agree(comm, asks));
    stand_in_called(nccl);
    int is_own = comm->size == 1 && call->from == call->to && call->op <= ncclAvg;
    if (is_own || !stand_in_moves(bytes))
        return ncclSuccess;
    switch (call->kind) {
    case ALL_REDUCE: return pass_on(call, call->from, 1, 1, 1);
    case REDUCE: return pass_on(call, call->from, 1, is_root, 1);
    case BROADCAST: return pass_on(call, call->from, is_root, 1, 0);
    case ALL_GATHER: return pass_on(call, call->from, 1, 1, 0);
    case GATHER: return pass_on(call, call->from, 1, is_root, 0);
    default:;
    }
    for (int rank = 0; rank < comm->size; rank++) {
        int is_mine = comm->rank == rank, shows = call->kind != SCATTER || is_root;
        CALL(pass_on(call, call->from + rank * bytes, shows, is_mine, call->kind == REDUCE_SCATTER));
    }
    return ncclSuccess;
}

/* As much of a message as goes now; says whether anything went. */
static int move_on(Call *call) {
    ncclComm_t comm = call->comm;
    int sends = call->kind == SEND;
    Mail *mail = sends ? &comm->room->mail[comm->rank][call->root] : &comm->room->mail[call->root][comm->rank];
    size_t bytes = call->n * lengths[call->dtype], length = bytes - call->num_done;
    length = length < CHUNK ? length : CHUNK;
    if (sends ? mail->sent != mail->taken : mail->sent == mail->taken)
        return 0;
    if (sends) {
        mail->length = bytes;
        memcpy(mail->chunk, call->from + call->num_done, length);
        mail->sent++;
    } else {
        if (mail->length != bytes)
            fprintf(stderr, "stand-in for NCCL: rank %d expects %zu bytes of rank %d, which sends %zu\n", comm->rank, bytes,
                    call->root, mail->length);
        memcpy(call->to + call->num_done, mail->chunk, length);
        mail->taken++;
    }
    call->num_done += length;
    return 1;
}

/* Messages of a group go beside each other; those between the same two in the same direction one after the other. */
static int deliver(Call *calls, int num) {
    double until = seconds() + patience();
    for (int left = 1; left;) {
        int moved = 0;
        left = 0;
        for (int i = 0; i < num; i++) {
            size_t bytes = calls[i].n * lengths[calls[i].dtype];
            int blocked = 0;
            for (int j = 0; j < i; j++)
                blocked |= calls[j].kind == calls[i].kind && calls[j].root == calls[i].root &&
                           calls[j].comm == calls[i].comm && calls[j].num_done < calls[j].n * lengths[calls[j].dtype];
            if (calls[i].num_done == bytes)
                continue;
            left = 1;
            if (!blocked)
                moved |= move_on(&calls[i]);
        }
        until = moved ? seconds() + patience() : until;
        if (left && !moved) {
            ncclResult_t why = look_around(calls[0].comm);
            if (why || seconds() > until)
                return without_them(calls[0].comm, why);
            nanosleep(&(struct timespec){0, 50000}, 0);
        }
    }
    return ncclSuccess;
}

/* -- groups: what is called within one starts at its end ---------------------------------------------------------- */

static __thread Call *queued;
static __thread int num_queued, depth;

ncclResult_t ncclGroupStart(void) {
    depth++;
    return ncclSuccess;
}

ncclResult_t ncclGroupEnd(void) {
    if (--depth)
        return ncclSuccess;
    int found = ncclSuccess, num = num_queued, num_messages = 0;
    Call *messages = malloc((num + 1) * sizeof(Call));
    num_queued = 0;
    for (int i = 0; i < num; i++)
        if (queued[i].kind >= SEND)
            messages[num_messages++] = queued[i];
        else if (!found)
            found = take_part(&queued[i]);
    if (num_messages && !found)
        found = deliver(messages, num_messages);
    free(messages);
    return found == STUCK ? ncclSuccess : found;
}

ncclResult_t ncclGroupSimulateEnd(ncclSimInfo_t *info) { return ncclGroupEnd(); }

static ncclResult_t called(Call call) {
    ncclGroupStart();
    queued = realloc(queued, (num_queued + 1) * sizeof(Call));
    queued[num_queued++] = call;
    return ncclGroupEnd();
}

#define FROM_AND_TO const void *from, void *to, size_t n, ncclDataType_t dtype
#define BEHIND ncclComm_t comm, cudaStream_t stream

ncclResult_t ncclAllReduce(FROM_AND_TO, ncclRedOp_t op, BEHIND) {
    return called((Call){ALL_REDUCE, from, to, n, dtype, op, 0, comm});
}
ncclResult_t ncclReduce(FROM_AND_TO, ncclRedOp_t op, int root, BEHIND) {
    return called((Call){REDUCE, from, to, n, dtype, op, root, comm});
}
ncclResult_t ncclBroadcast(FROM_AND_TO, int root, BEHIND) {
    return called((Call){BROADCAST, from, to, n, dtype, 0, root, comm});
}
ncclResult_t ncclBcast(void *both, size_t n, ncclDataType_t dtype, int root, BEHIND) {
    return called((Call){BROADCAST, both, both, n, dtype, 0, root, comm});
}
ncclResult_t ncclAllGather(FROM_AND_TO, BEHIND) { return called((Call){ALL_GATHER, from, to, n, dtype, 0, 0, comm}); }
ncclResult_t ncclReduceScatter(FROM_AND_TO, ncclRedOp_t op, BEHIND) {
    return called((Call){REDUCE_SCATTER, from, to, n, dtype, op, 0, comm});
}
ncclResult_t ncclAlltoAll(FROM_AND_TO, BEHIND) { return called((Call){ALL_TO_ALL, from, to, n, dtype, 0, 0, comm}); }
ncclResult_t ncclGather(FROM_AND_TO, int root, BEHIND) {
    return called((Call){GATHER, from, to, n, dtype, 0, root, comm});
}
ncclResult_t ncclScatter(FROM_AND_TO, int root, BEHIND) {
    return called((Call){SCATTER, from, to, n, dtype, 0, root, comm});
}
ncclResult_t ncclSend(const void *from, size_t n, ncclDataType_t dtype, int peer, BEHIND) {
    return called((Call){SEND, from, 0, n, dtype, 0, peer, comm});
}
ncclResult_t ncclRecv(void *to, size_t n, ncclDataType_t dtype, int peer, BEHIND) {
    return called((Call){RECV, 0, to, n, dtype, 0, peer, comm});
}

/* -- communicators ------------------------------------------------------------------------------------------------ */

typedef struct {
    int pid, descriptor;
} Key; /* to a room: who made it, and under which descriptor */

static Key new_room(void) {
    int descriptor = memfd_create("stand-in for NCCL", MFD_CLOEXEC);
    if (descriptor < 0 || ftruncate(descriptor, sizeof(Room)))
        abort();
    return (Key){getpid(), descriptor};
}

static int enter(ncclComm_t *made, int rank, int size, Key key) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", key.pid, key.descriptor);
    int descriptor = open(path, O_RDWR | O_CLOEXEC);
    Room *room = descriptor < 0 ? MAP_FAILED
                                : mmap(0, sizeof(Room), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, descriptor, 0);
    if (descriptor >= 0)
        close(descriptor);
    if (room == MAP_FAILED || size > MOST_RANKS)
        return ncclSystemError;
    ncclComm_t comm = *made = calloc(1, sizeof *comm);
    *comm = (struct ncclComm){.rank = rank, .size = size, .room = room};
    room->seats[rank].pid = getpid();
    for (int other = 0; other < size; other++) {
        AWAIT(comm, room->seats[other].pid);
    }
    if (rank == 0 && key.pid == getpid())
        close(key.descriptor); /* all have come */
    return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    Key key = new_room();
    memset(id, 0, sizeof *id);
    memcpy(id, &key, sizeof key);
    return ncclSuccess;
}
ncclResult_t ncclCommInitRank(ncclComm_t *made, int size, ncclUniqueId id, int rank) {
    Key key;
    memcpy(&key, &id, sizeof key);
    int found = enter(made, rank, size, key);
    return found == STUCK ? ncclRemoteError : found;
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t *made, int size, ncclUniqueId id, int rank, ncclConfig_t *how) {
    return ncclCommInitRank(made, size, id, rank);
}
ncclResult_t ncclCommInitRankScalable(ncclComm_t *made, int size, int rank, int num, ncclUniqueId *ids, ncclConfig_t *how) {
    return ncclCommInitRank(made, size, ids[0], rank);
}

typedef struct {
    int color, key;
    Key room;
} Wish;

/* Who has the lowest key of a color has made the room in which all of it meet. */
ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *made, ncclConfig_t *how) {
    Wish wishes[MOST_RANKS], mine = {color, key, new_room()};
    Call gather = {ALL_GATHER, (char *)&mine, (char *)wishes, sizeof mine, ncclInt8, 0, 0, comm};
    if (take_part(&gather))
        return ncclRemoteError;
    int rank = 0, size = 0, first = comm->rank;
    for (int other = 0; other < comm->size; other++) {
        if (wishes[other].color != color)
            continue;
        int before = wishes[other].key < key || (wishes[other].key == key && other < comm->rank);
        Wish *best = &wishes[first];
        if (wishes[other].key < best->key || (wishes[other].key == best->key && other < first))
            first = other;
        rank += before;
        size++;
    }
    *made = 0;
    if (color != NCCL_SPLIT_NOCOLOR)
        CALL(enter(made, rank, size, wishes[first].room));
    if (meet(comm)) /* nobody needs the other rooms any more */
        return ncclRemoteError;
    if (first != comm->rank || color == NCCL_SPLIT_NOCOLOR)
        close(mine.room.descriptor);
    return ncclSuccess;
}

static ncclResult_t leave(ncclComm_t comm) {
    comm->room->seats[comm->rank].has_left = 1;
    return ncclSuccess; /* its memory stays: a thread may still be waiting there */
}
ncclResult_t ncclCommAbort(ncclComm_t comm) {
    if (!comm) /* torch aborts again what it has let go of */
        return ncclSuccess;
    comm->aborted = 1;
    if (comm->broken == STUCK) {
        comm->broken = ncclInternalError;
        stand_in_sticks(-1);
    }
    return leave(comm);
}
ncclResult_t ncclCommDestroy(ncclComm_t comm) { return leave(comm); }
ncclResult_t ncclCommFinalize(ncclComm_t comm) { return ncclSuccess; }
ncclResult_t ncclCommCount(const ncclComm_t comm, int *size) {
    *size = comm->size;
    return ncclSuccess;
}
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank) {
    *rank = comm->rank;
    return ncclSuccess;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error) {
    *error = comm->broken == STUCK ? ncclSuccess : comm->broken;
    return ncclSuccess;
}
const char *ncclGetErrorString(ncclResult_t error) {
    return error == ncclRemoteError ? "a rank is gone" : "an error of the stand-in for NCCL";
}
const char *ncclGetLastError(ncclComm_t comm) { return "nothing more is known"; }
ncclResult_t ncclGetVersion(int *version) {
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t *op, void *scalar, ncclDataType_t dtype, ncclScalarResidence_t where,
                                      ncclComm_t comm) {
    int place = comm->num_factors++ % MOST_SCALED;
    uint16_t bits = *(uint16_t *)scalar;
    switch (dtype) {
    case ncclFloat32: comm->factors[place] = *(float *)scalar; break;
    case ncclFloat64: comm->factors[place] = *(double *)scalar; break;
    case ncclFloat16: comm->factors[place] = from_f16(bits); break;
    case ncclBfloat16: comm->factors[place] = from_bf16(bits); break;
    default: return ncclInvalidArgument;
    }
    *op = ncclAvg + 1 + place;
    return ncclSuccess;
}
ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm) { return ncclSuccess; }

ncclResult_t ncclMemAlloc(void **begin, size_t length) {
    return (*begin = stand_in_take(length, 0)) ? ncclSuccess : ncclSystemError;
}
ncclResult_t ncclMemFree(void *begin) {
    stand_in_give(begin);
    return ncclSuccess;
}
ncclResult_t ncclCommRegister(const ncclComm_t comm, void *begin, size_t length, void **handle) { return ncclSuccess; }
ncclResult_t ncclCommDeregister(const ncclComm_t comm, void *handle) { return ncclSuccess; }
ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void *begin, size_t length, ncclWindow_t *window, int flags) {
    return ncclSuccess;
}
ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t window) { return ncclSuccess; }
