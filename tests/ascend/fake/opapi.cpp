// A fake of the aclnn operator library (libopapi): the operators of the torch_npu path, computed by torch on the
// host. Names, argument order and types follow the calls that torch_npu's op-plugin makes; an operator that is
// not here is not found by torch_npu, which then says so.
//
// 16-bit products accumulate in fp32 and round once, as a cube core does. The log has a line per operator: its name,
// then dtype and shape of each tensor.
#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include <cstdio>
#include <functional>
#include <sstream>
#include <string>
#include <vector>

#include "log.h"

struct aclTensor {
    at::Tensor t;
};
struct aclScalar {
    c10::Scalar s;
};
struct aclIntArray {
    std::vector<int64_t> v;
};
struct aclTensorList {
    std::vector<aclTensor *> v;
};
struct aclOpExecutor {
    std::function<void()> compute;
};

namespace {

constexpr int kInvalid = 161002;   // ACLNN_ERR_PARAM_INVALID
constexpr int kInternal = 561103;  // ACLNN_ERR_INNER

using Tensor = const aclTensor *;
using Scalar = const aclScalar *;
using Ints = const aclIntArray *;
using Tensors = const aclTensorList *;

at::ScalarType dtype_of(int acl)
{
    switch (acl) {  // aclDataType
        case 0: return at::kFloat;
        case 1: return at::kHalf;
        case 2: return at::kChar;
        case 3: return at::kInt;
        case 4: return at::kByte;
        case 6: return at::kShort;
        case 9: return at::kLong;
        case 11: return at::kDouble;
        case 12: return at::kBool;
        case 27: return at::kBFloat16;
        default: TORCH_CHECK(false, "aclDataType ", acl, " has no torch dtype here");
    }
}

void log(const char *name, std::initializer_list<at::Tensor> tensors)
{
    std::ostringstream line;
    line << name;
    for (const at::Tensor &t : tensors) line << ' ' << t.scalar_type() << t.sizes();
    fake_log(line.str());
}

// The result goes where and as the caller laid it out, never resized.
void put(Tensor out, const at::Tensor &result)
{
    TORCH_CHECK(out->t.sizes() == result.sizes(), "out is ", out->t.sizes(), ", the result ", result.sizes());
    out->t.copy_(result);
}

at::Tensor product(const at::Tensor &a, const at::Tensor &b, int8_t cube_math_type)
{
    TORCH_CHECK(a.scalar_type() == b.scalar_type(), "product of ", a.scalar_type(), " and ", b.scalar_type());
    if (a.scalar_type() == at::kDouble) return at::matmul(a, b);
    TORCH_CHECK(a.scalar_type() != at::kFloat || cube_math_type == 0, "HF32 products are not emulated");
    return at::matmul(a.to(at::kFloat), b.to(at::kFloat));
}

c10::List<std::optional<at::Tensor>> indices_of(Tensors list)
{
    c10::List<std::optional<at::Tensor>> indices;
    for (Tensor t : list->v) {
        indices.push_back(t == nullptr || !t->t.defined() || t->t.numel() == 0 ? std::nullopt : std::optional(t->t));
    }
    return indices;
}

int plan(const char *name, uint64_t *workspace, aclOpExecutor **executor, std::initializer_list<at::Tensor> seen,
         std::function<void()> compute)
{
    log(name, seen);
    *workspace = 0;
    *executor = new aclOpExecutor{std::move(compute)};
    return 0;
}

int run(const char *name, aclOpExecutor *executor)
{
    try {
        c10::NoGradGuard no_grad;
        c10::impl::ExcludeDispatchKeyGuard plain(c10::autograd_dispatch_keyset);
        executor->compute();
        delete executor;
        return 0;
    } catch (const std::exception &e) {
        std::fprintf(stderr, "fake %s: %s\n", name, e.what());
        return kInternal;
    }
}

template <class F>
auto guarded(const char *name, F make) -> decltype(make())
{
    try {
        return make();
    } catch (const std::exception &e) {
        std::fprintf(stderr, "fake %s: %s\n", name, e.what());
        return {};
    }
}

}  // namespace

extern "C" {

aclTensor *aclCreateTensor(const int64_t *sizes, uint64_t n, int dtype, const int64_t *strides, int64_t offset, int,
                           const int64_t *, uint64_t, void *data)
{
    return guarded("aclCreateTensor", [&] {
        const at::ScalarType type = dtype_of(dtype);
        char *first = static_cast<char *>(data) + offset * static_cast<int64_t>(c10::elementSize(type));
        return new aclTensor{at::from_blob(first, at::IntArrayRef(sizes, n), at::IntArrayRef(strides, n), type)};
    });
}
aclScalar *aclCreateScalar(void *value, int dtype)
{
    return guarded("aclCreateScalar", [&] {
        const at::ScalarType type = dtype_of(dtype);
        return new aclScalar{at::from_blob(value, {}, type).clone().item()};
    });
}
aclIntArray *aclCreateIntArray(const int64_t *values, uint64_t n) { return new aclIntArray{{values, values + n}}; }
aclTensorList *aclCreateTensorList(aclTensor *const *values, uint64_t n)
{
    return new aclTensorList{{values, values + n}};
}

int aclDestroyTensor(const aclTensor *x) { return delete x, 0; }
int aclDestroyScalar(const aclScalar *x) { return delete x, 0; }
int aclDestroyIntArray(const aclIntArray *x) { return delete x, 0; }
int aclDestroyTensorList(const aclTensorList *x)
{
    for (const aclTensor *t : x->v) delete t;
    return delete x, 0;
}
int aclDestroyAclOpExecutor(aclOpExecutor *x) { return delete x, 0; }

// OP(name, (parameters), (tensors to log), computation): the two calls that make an aclnn operator.
#define OP(NAME, PARAMETERS, SEEN, ...)                                                                             \
    int aclnn##NAME(void *, uint64_t, aclOpExecutor *executor, void *) { return run("aclnn" #NAME, executor); }     \
    int aclnn##NAME##GetWorkspaceSize(UNPACK PARAMETERS, uint64_t *workspace, aclOpExecutor **executor)             \
    {                                                                                                               \
        return plan("aclnn" #NAME, workspace, executor, {UNPACK SEEN}, [=] { __VA_ARGS__; });                       \
    }
#define UNPACK(...) __VA_ARGS__

#define UNARY(NAME, FUNCTION) OP(NAME, (Tensor x, Tensor out), (x->t), put(out, FUNCTION(x->t)))
#define BINARY(NAME, FUNCTION) OP(NAME, (Tensor x, Tensor y, Tensor out), (x->t, y->t), put(out, FUNCTION(x->t, y->t)))

// Memory.
OP(InplaceCopy, (Tensor x, Tensor source), (x->t, source->t), x->t.copy_(source->t))
OP(InplaceZero, (Tensor x), (x->t), x->t.zero_())
OP(InplaceOne, (Tensor x), (x->t), x->t.fill_(1))
OP(InplaceFillScalar, (Tensor x, Scalar value), (x->t), x->t.fill_(value->s))
OP(Cast, (Tensor x, int dtype, Tensor out), (x->t), put(out, x->t.to(dtype_of(dtype))))

// Elementwise.
UNARY(Exp, at::exp)
UNARY(Neg, at::neg)
UNARY(Abs, at::abs)
UNARY(Log, at::log)
UNARY(Sqrt, at::sqrt)
UNARY(Rsqrt, at::rsqrt)
UNARY(Round, at::round)
UNARY(Sigmoid, at::sigmoid)
UNARY(IsFinite, at::isfinite)
UNARY(LogicalNot, at::logical_not)
UNARY(BitwiseNot, at::bitwise_not)
BINARY(Mul, at::mul)
BINARY(Div, at::div)
BINARY(Maximum, at::maximum)
BINARY(Minimum, at::minimum)
BINARY(LtTensor, at::lt)
BINARY(LeTensor, at::le)
BINARY(GtTensor, at::gt)
BINARY(GeTensor, at::ge)
BINARY(EqTensor, at::eq)
BINARY(BitwiseAndTensor, at::bitwise_and)
OP(Add, (Tensor x, Tensor y, Scalar alpha, Tensor out), (x->t, y->t), put(out, at::add(x->t, y->t, alpha->s)))
OP(Sub, (Tensor x, Tensor y, Scalar alpha, Tensor out), (x->t, y->t), put(out, at::sub(x->t, y->t, alpha->s)))
OP(Adds, (Tensor x, Scalar y, Scalar alpha, Tensor out), (x->t), put(out, at::add(x->t, y->s, alpha->s)))
OP(Subs, (Tensor x, Scalar y, Scalar alpha, Tensor out), (x->t), put(out, at::sub(x->t, y->s, alpha->s)))
OP(Rsubs, (Tensor x, Scalar y, Scalar alpha, Tensor out), (x->t), put(out, at::rsub(x->t, y->s, alpha->s)))
OP(Muls, (Tensor x, Scalar y, Tensor out), (x->t), put(out, at::mul(x->t, y->s)))
OP(Divs, (Tensor x, Scalar y, Tensor out), (x->t), put(out, at::div(x->t, y->s)))
OP(InplaceAdd, (Tensor x, Tensor y, Scalar alpha), (x->t, y->t), x->t.add_(y->t, alpha->s))
OP(InplaceSub, (Tensor x, Tensor y, Scalar alpha), (x->t, y->t), x->t.sub_(y->t, alpha->s))
OP(InplaceMul, (Tensor x, Tensor y), (x->t, y->t), x->t.mul_(y->t))
OP(InplaceMuls, (Tensor x, Scalar y), (x->t), x->t.mul_(y->s))
OP(InplaceAdds, (Tensor x, Scalar y, Scalar alpha), (x->t), x->t.add_(y->s, alpha->s))
OP(InplaceSubs, (Tensor x, Scalar y, Scalar alpha), (x->t), x->t.sub_(y->s, alpha->s))
OP(LtScalar, (Tensor x, Scalar y, Tensor out), (x->t), put(out, at::lt(x->t, y->s)))
OP(LeScalar, (Tensor x, Scalar y, Tensor out), (x->t), put(out, at::le(x->t, y->s)))
OP(GtScalar, (Tensor x, Scalar y, Tensor out), (x->t), put(out, at::gt(x->t, y->s)))
OP(GeScalar, (Tensor x, Scalar y, Tensor out), (x->t), put(out, at::ge(x->t, y->s)))
OP(EqScalar, (Tensor x, Scalar y, Tensor out), (x->t), put(out, at::eq(x->t, y->s)))
OP(NeScalar, (Tensor x, Scalar y, Tensor out), (x->t), put(out, at::ne(x->t, y->s)))
OP(FloorDivides, (Tensor x, Scalar y, Tensor out), (x->t), put(out, at::floor_divide(x->t, y->s)))
BINARY(FloorDivide, at::floor_divide)
OP(PowTensorScalar, (Tensor x, Scalar y, Tensor out), (x->t), put(out, at::pow(x->t, y->s)))
OP(ClampMin, (Tensor x, Scalar least, Tensor out), (x->t), put(out, at::clamp_min(x->t, least->s)))
OP(Clamp, (Tensor x, Scalar least, Scalar most, Tensor out), (x->t),
   put(out, at::clamp(x->t, least == nullptr ? std::optional<c10::Scalar>() : least->s,
                      most == nullptr ? std::optional<c10::Scalar>() : most->s)))
OP(SWhere, (Tensor where, Tensor x, Tensor y, Tensor out), (where->t, x->t, y->t),
   put(out, at::where(where->t, x->t, y->t)))
OP(InplaceMaskedFillScalar, (Tensor x, Tensor mask, Scalar value), (x->t), x->t.masked_fill_(mask->t, value->s))
OP(Softplus, (Tensor x, Scalar beta, Scalar threshold, Tensor out), (x->t),
   put(out, at::softplus(x->t, beta->s, threshold->s)))
OP(SoftplusBackward, (Tensor grad, Tensor x, Scalar beta, Scalar threshold, Tensor out), (grad->t, x->t),
   put(out, at::softplus_backward(grad->t, x->t, beta->s, threshold->s)))
OP(SigmoidBackward, (Tensor grad, Tensor y, Tensor out), (grad->t, y->t), put(out, at::sigmoid_backward(grad->t, y->t)))

// Along dimensions.
OP(Cumsum, (Tensor x, int64_t dim, int dtype, Tensor out), (x->t), put(out, at::cumsum(x->t, dim, dtype_of(dtype))))
OP(ReduceSum, (Tensor x, Ints dims, bool keep, int dtype, Tensor out), (x->t),
   put(out, at::sum(x->t, at::IntArrayRef(dims->v), keep, dtype_of(dtype))))
OP(Amax, (Tensor x, Ints dims, bool keep, Tensor out), (x->t), put(out, at::amax(x->t, dims->v, keep)))
OP(Amin, (Tensor x, Ints dims, bool keep, Tensor out), (x->t), put(out, at::amin(x->t, dims->v, keep)))
OP(Max, (Tensor x, Tensor out), (x->t), put(out, at::max(x->t)))
OP(All, (Tensor x, Ints dims, bool keep, Tensor out), (x->t), put(out, at::all(x->t, dims->v, keep)))
OP(Flip, (Tensor x, Ints dims, Tensor out), (x->t), put(out, at::flip(x->t, dims->v)))
OP(Tril, (Tensor x, int64_t diagonal, Tensor out), (x->t), put(out, at::tril(x->t, diagonal)))
OP(Triu, (Tensor x, int64_t diagonal, Tensor out), (x->t), put(out, at::triu(x->t, diagonal)))
OP(InplaceTril, (Tensor x, int64_t diagonal), (x->t), x->t.tril_(diagonal))
OP(InplaceTriu, (Tensor x, int64_t diagonal), (x->t), x->t.triu_(diagonal))
OP(Cat, (Tensors list, int64_t dim, Tensor out), (out->t), std::vector<at::Tensor> parts;
   for (Tensor t : list->v) parts.push_back(t->t); put(out, at::cat(parts, dim)))
OP(Stack, (Tensors list, int64_t dim, Tensor out), (out->t), std::vector<at::Tensor> parts;
   for (Tensor t : list->v) parts.push_back(t->t); put(out, at::stack(parts, dim)))
OP(ConstantPadNd, (Tensor x, Ints pad, Scalar value, Tensor out), (x->t),
   put(out, at::constant_pad_nd(x->t, pad->v, value->s)))
OP(Arange, (Scalar start, Scalar end, Scalar step, Tensor out), (out->t),
   put(out, at::arange(start->s, end->s, step->s, out->t.scalar_type())))
OP(RepeatInterleaveIntWithDim, (Tensor x, int64_t repeats, int64_t dim, int64_t, Tensor out), (x->t),
   put(out, at::repeat_interleave(x->t, repeats, dim)))

// By index.
OP(Index, (Tensor x, Tensors indices, Tensor out), (x->t), put(out, at::index(x->t, indices_of(indices))))
OP(IndexSelect, (Tensor x, int64_t dim, Tensor index, Tensor out), (x->t, index->t),
   put(out, at::index_select(x->t, dim, index->t)))
OP(IndexPutImpl, (Tensor x, Tensors indices, Tensor values, bool accumulate, bool unsafe), (x->t, values->t),
   at::_index_put_impl_(const_cast<at::Tensor &>(x->t), indices_of(indices), values->t, accumulate, unsafe))

OP(IndexCopy, (Tensor x, int64_t dim, Tensor index, Tensor source, Tensor out), (x->t, index->t, source->t),
   put(out, at::index_copy(x->t, dim, index->t, source->t)))
OP(InplaceIndexCopy, (Tensor x, int64_t dim, Tensor index, Tensor source), (x->t, index->t, source->t),
   x->t.index_copy_(dim, index->t, source->t))

// Products.
OP(BatchMatMul, (Tensor a, Tensor b, Tensor out, int8_t mode), (a->t, b->t, out->t),
   TORCH_CHECK(a->t.dim() == 3 && b->t.dim() == 3, "3 dimensions each"); put(out, product(a->t, b->t, mode)))
OP(Matmul, (Tensor a, Tensor b, Tensor out, int8_t mode), (a->t, b->t, out->t), put(out, product(a->t, b->t, mode)))
OP(Mm, (Tensor a, Tensor b, Tensor out, int8_t mode), (a->t, b->t, out->t), put(out, product(a->t, b->t, mode)))

}  // extern "C"
