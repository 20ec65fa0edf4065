// What MLIR's lowering of memref.copy calls when a copy is strided.
#include <stdint.h>
#include <string.h>

// A memref of any rank points to {allocated, aligned, offset, sizes[rank], strides[rank]}.
typedef struct {
    int64_t rank;
    void *descriptor;
} Memref;

static void copy(int64_t size, int64_t rank, const int64_t *sizes, const char *from, const int64_t *from_strides, char *to,
                 const int64_t *to_strides)
{
    if (rank == 0) {
        memcpy(to, from, size);
        return;
    }
    for (int64_t i = 0; i < sizes[0]; ++i)
        copy(size, rank - 1, sizes + 1, from + i * from_strides[0] * size, from_strides + 1,
             to + i * to_strides[0] * size, to_strides + 1);
}

void memrefCopy(int64_t size, Memref *from, Memref *to)
{
    const int64_t rank = from->rank;
    char **a = from->descriptor, **b = to->descriptor;
    const int64_t *m = (int64_t *)(a + 2), *n = (int64_t *)(b + 2);
    copy(size, rank, m + 1, a[1] + m[0] * size, m + 1 + rank, b[1] + n[0] * size, n + 1 + rank);
}
