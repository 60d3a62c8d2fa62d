// FlashInfer's planner, which is host code, compiled without CUDA: over as much of CUDA's runtime as it asks for, with
// the answers of a GPU that need not be there. Memory of the device is the host's.
//
// Built by flashinfer_planner.py with empty files in the place of CUDA's headers.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <string>
#include <tuple>

#define __host__
#define __device__
#define __global__
#define __grid_constant__
#define __forceinline__ inline

enum cudaError_t { cudaSuccess };
enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount,
  cudaDevAttrComputeCapabilityMajor,
  cudaDevAttrComputeCapabilityMinor,
  cudaDevAttrMaxSharedMemoryPerBlockOptin,
  cudaDevAttrMaxSharedMemoryPerMultiprocessor,
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost };
using cudaStream_t = void*;
struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct int2 {
  int x, y;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
};
struct cudaDeviceProp {
  int multiProcessorCount;
};

static int attributes[cudaDevAttrMaxSharedMemoryPerMultiprocessor];

static const char* cudaGetErrorString(cudaError_t) { return "an error"; }
static cudaError_t cudaGetLastError() { return cudaSuccess; }
static cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
static cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  if (attribute >= cudaDevAttrMaxSharedMemoryPerMultiprocessor) std::terminate();
  *value = attributes[attribute];
  return cudaSuccess;
}
static cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t size, cudaMemcpyKind, cudaStream_t) {
  std::memcpy(to, from, size);
  return cudaSuccess;
}

// What only other planners call.
template <typename... Arguments>
cudaError_t not_here(Arguments...) {
  std::terminate();
}
#define cudaMemcpy not_here
#define cudaGetDeviceProperties not_here
#define cudaOccupancyMaxPotentialClusterSize not_here
#define cudaOccupancyMaxActiveBlocksPerMultiprocessor not_here
#define cudaFuncSetAttribute not_here

// CUDA has these without a namespace, for numbers of two types.
template <typename A, typename B>
auto max(A a, B b) {
  return a > b ? a : b;
}
template <typename A, typename B>
auto min(A a, B b) {
  return a < b ? a : b;
}

// The planners name its one type only; all else in it is for kernels.
#define FLASHINFER_POS_ENC_CUH_
namespace flashinfer {
enum class PosEncodingMode;
}

#include <flashinfer/attention/scheduler.cuh>

// Number of multiprocessors, capability, and shared memory of a block.
extern "C" void set_gpu(int num_processors, int major, int minor, int shared_bytes) {
  const int given[] = {num_processors, major, minor, shared_bytes};
  std::copy(std::begin(given), std::end(given), attributes);
}

// As `BatchPrefillWithKVCachePlan` in FlashInfer's batch_prefill.cu calls it. Writes the plan's 15 numbers, or why there
// is none.
extern "C" bool plan(int64_t* numbers, char* reason, size_t reason_size, void* floats, size_t float_bytes, void* ints,
                     size_t int_bytes, void* pinned, int32_t* query_indptr, int32_t* page_indptr, int64_t max_tokens,
                     int64_t num_rows, int64_t num_heads, int64_t num_kv_heads, int64_t page_size, int64_t is_captured,
                     int64_t head_dim_qk, int64_t head_dim_vo, int64_t window_left, int64_t fixed_split_size,
                     int64_t disable_split_kv, int64_t num_colocated_ctas, int64_t uniform_q_len,
                     int64_t kv_dtype_bytes) {
  flashinfer::PrefillPlanInfo info;
  try {
    flashinfer::PrefillPlan<int32_t>(floats, float_bytes, ints, pinned, int_bytes, info, query_indptr, page_indptr,
                                     max_tokens, num_rows, num_heads, num_kv_heads, head_dim_qk, head_dim_vo, page_size,
                                     is_captured, 2, window_left, fixed_split_size, disable_split_kv,
                                     num_colocated_ctas, uniform_q_len, nullptr, kv_dtype_bytes);
  } catch (const std::exception& error) {
    std::strncpy(reason, error.what(), reason_size - 1);
    return false;
  }
  const auto found = info.ToVector();
  std::copy(found.begin(), found.end(), numbers);
  return true;
}
