/* The launcher of embedded kernels: loads a cubin on first use and launches it.
 *
 * Valid C99 and C++11, because TVM hands it to whichever compiler it finds.  The CUDA driver is
 * opened when the first kernel is launched, so that a library can be linked, loaded and inspected
 * where there is none.  What is declared here of the driver API is its documented, versioned ABI
 * ("CUDA Driver API", NVIDIA): sections Module, Execution Control, Tensor Map Object.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <tvm/ffi/c_api.h>
#include <tvm/ffi/extra/c_env_api.h>

#ifdef __cplusplus
extern "C" {
#endif

#define RF_UNUSED __attribute__((unused)) /* not every kernel needs every check */
#define RF_MAX_DEVICES 64
#define RF_CUDA_SUCCESS 0
#define RF_SHARED_BYTES_OPTIN 97          /* CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN */
#define RF_CAPABILITY_MAJOR 75            /* CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR */
#define RF_CAPABILITY_MINOR 76            /* CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR */
#define RF_FUNC_DYNAMIC_SHARED_BYTES 8    /* CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES */
#define RF_FUNC_NON_PORTABLE_CLUSTER 14   /* CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED */
#define RF_LAUNCH_COOPERATIVE 2           /* CU_LAUNCH_ATTRIBUTE_COOPERATIVE */
#define RF_LAUNCH_CLUSTER 4               /* CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION */
#define RF_LAUNCH_CLUSTER_SCHEDULING 5    /* ..._CLUSTER_SCHEDULING_POLICY_PREFERENCE */
#define RF_GRAPH_EDGES_VERSION 12030      /* CUDA whose graphs hold dependent launches */
#define RF_LAUNCH_DEPENDENT 6             /* ..._PROGRAMMATIC_STREAM_SERIALIZATION */
#define RF_CLUSTER_SPREAD 1               /* CU_CLUSTER_SCHEDULING_POLICY_SPREAD */

typedef struct {
  int32_t id;
  char pad[4];
  union {
    char bytes[64];
    int32_t number;
    uint32_t dim[3];
  } value;
} rf_launch_attribute;

typedef struct {
  uint32_t grid[3];
  uint32_t block[3];
  uint32_t shared_bytes;
  void* stream;
  rf_launch_attribute* attributes;
  uint32_t num_attributes;
} rf_launch_config;

typedef struct {
  uint64_t opaque[16];
} __attribute__((aligned(128))) rf_tensor_map;

/* The driver's functions that are used here, as they are named in libcuda. */
typedef struct {
  int32_t (*cuInit)(uint32_t);
  int32_t (*cuDriverGetVersion)(int32_t*);
  int32_t (*cuGetErrorName)(int32_t, const char**);
  int32_t (*cuGetErrorString)(int32_t, const char**);
  int32_t (*cuCtxGetDevice)(int32_t*);
  int32_t (*cuCtxSetCurrent)(void*);
  int32_t (*cuDeviceGetAttribute)(int32_t*, int32_t, int32_t);
  int32_t (*cuDevicePrimaryCtxRetain)(void**, int32_t);
  int32_t (*cuModuleLoadData)(void**, const void*);
  int32_t (*cuModuleGetFunction)(void**, void*, const char*);
  int32_t (*cuFuncSetAttribute)(void*, int32_t, int32_t);
  int32_t (*cuLaunchKernelEx)(const rf_launch_config*, void*, void**, void**);
  int32_t (*cuTensorMapEncodeTiled)(rf_tensor_map*, int32_t, uint32_t, void*, const uint64_t*,
                                    const uint64_t*, const uint32_t*, const uint32_t*, int32_t,
                                    int32_t, int32_t, int32_t);
} rf_driver_api;

typedef struct {
  const char* symbol;
  const char* entry;
  const void* image;
  int32_t capability;
  uint32_t threads[3];
  uint32_t shared_bytes;
  uint32_t num_ctas;
  int32_t cooperative;
  int32_t dependent_launch;
  void* functions[RF_MAX_DEVICES]; /* one per device, loaded on its first launch */
} rf_kernel;

static rf_driver_api rf_driver;
static int32_t rf_driver_version = 0; /* 1000 times major plus 10 times minor, of CUDA */
static void* rf_driver_library = NULL; /* set last: whoever sees it sees the functions */
static pthread_mutex_t rf_mutex = PTHREAD_MUTEX_INITIALIZER;

static int rf_fail(const char* symbol, const char* message) {
  const char* parts[3] = {symbol, ": ", message};
  TVMFFIErrorSetRaisedFromCStrParts("RuntimeError", parts, 3);
  return -1;
}

static int rf_fail_cuda(const char* symbol, const char* what, int32_t code) {
  char message[1024];
  const char *name = "", *text = "";
  rf_driver.cuGetErrorName(code, &name);
  rf_driver.cuGetErrorString(code, &text);
  if (name != NULL && name[0] != 0) {
    snprintf(message, sizeof message, "%s failed with %s (%s)", what, name, text ? text : "");
  } else {
    snprintf(message, sizeof message, "%s failed with the CUDA error %d", what, code);
  }
  return rf_fail(symbol, message);
}

static void* rf_find(void* library, const char* name, const char** missing) {
  void* found = dlsym(library, name);
  if (found == NULL && *missing == NULL) *missing = name;
  return found;
}

/* Fill rf_driver; the caller holds the mutex. */
static int rf_open_driver(const char* symbol) {
  char message[256];
  const char* missing = NULL;
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == NULL) {
    return rf_fail(symbol, "the CUDA driver (libcuda.so.1) was not found on this machine");
  }
#define RF_FIND(name) \
  *(void**)(&rf_driver.name) = rf_find(library, #name, &missing)
  RF_FIND(cuInit);
  RF_FIND(cuDriverGetVersion);
  RF_FIND(cuGetErrorName);
  RF_FIND(cuGetErrorString);
  RF_FIND(cuCtxGetDevice);
  RF_FIND(cuCtxSetCurrent);
  RF_FIND(cuDeviceGetAttribute);
  RF_FIND(cuDevicePrimaryCtxRetain);
  RF_FIND(cuModuleLoadData);
  RF_FIND(cuModuleGetFunction);
  RF_FIND(cuFuncSetAttribute);
  RF_FIND(cuLaunchKernelEx);
  RF_FIND(cuTensorMapEncodeTiled);
#undef RF_FIND
  if (missing != NULL) {
    snprintf(message, sizeof message,
             "the CUDA driver has no %s; version 525 (CUDA 12.0) or newer is needed", missing);
    return rf_fail(symbol, message);
  }
  if (rf_driver.cuDriverGetVersion(&rf_driver_version) != RF_CUDA_SUCCESS) rf_driver_version = 0;
  __atomic_store_n(&rf_driver_library, library, __ATOMIC_RELEASE);
  return 0;
}

/* Load the kernel on `device`, whose context is current; the caller holds the mutex. */
static int rf_load_locked(rf_kernel* kernel, int32_t device, void** function) {
  char message[512];
  int32_t major = 0, minor = 0, most = 0, code;
  void *module, *found;
  if ((code = rf_driver.cuDeviceGetAttribute(&major, RF_CAPABILITY_MAJOR, device)) ||
      (code = rf_driver.cuDeviceGetAttribute(&minor, RF_CAPABILITY_MINOR, device)) ||
      (code = rf_driver.cuDeviceGetAttribute(&most, RF_SHARED_BYTES_OPTIN, device))) {
    return rf_fail_cuda(kernel->symbol, "cuDeviceGetAttribute", code);
  }
  /* From sm_90 on, code uses instructions of one architecture; before, of one major version. */
  if (kernel->capability / 10 != major || kernel->capability % 10 > minor ||
      (major >= 9 && kernel->capability % 10 != minor)) {
    snprintf(message, sizeof message,
             "it was compiled for compute capability %d.%d; device %d has %d.%d",
             kernel->capability / 10, kernel->capability % 10, device, major, minor);
    return rf_fail(kernel->symbol, message);
  }
  if (kernel->shared_bytes > (uint32_t)most) {
    snprintf(message, sizeof message, "it needs %u bytes of shared memory; device %d has %d",
             kernel->shared_bytes, device, most);
    return rf_fail(kernel->symbol, message);
  }
  if ((code = rf_driver.cuModuleLoadData(&module, kernel->image)) != RF_CUDA_SUCCESS) {
    return rf_fail_cuda(kernel->symbol, "cuModuleLoadData", code);
  }
  if ((code = rf_driver.cuModuleGetFunction(&found, module, kernel->entry)) != RF_CUDA_SUCCESS) {
    return rf_fail_cuda(kernel->symbol, "cuModuleGetFunction", code);
  }
  /* Up to 48 KB need no leave. */
  if (kernel->shared_bytes > 49152 &&
      (code = rf_driver.cuFuncSetAttribute(found, RF_FUNC_DYNAMIC_SHARED_BYTES,
                                           (int32_t)kernel->shared_bytes)) != RF_CUDA_SUCCESS) {
    return rf_fail_cuda(kernel->symbol, "asking for shared memory", code);
  }
  if (kernel->num_ctas > 8 && (code = rf_driver.cuFuncSetAttribute(
                                   found, RF_FUNC_NON_PORTABLE_CLUSTER, 1)) != RF_CUDA_SUCCESS) {
    return rf_fail_cuda(kernel->symbol, "asking for a large cluster", code);
  }
  *function = found;
  __atomic_store_n(&kernel->functions[device], found, __ATOMIC_RELEASE);
  return 0;
}

/* Find the current device, making device 0 current in a thread that has none, as the CUDA runtime
 * does. */
static int rf_current_device(const char* symbol, int32_t* device) {
  char message[128];
  void* context;
  int32_t code;
  if (__atomic_load_n(&rf_driver_library, __ATOMIC_ACQUIRE) == NULL) {
    int failed = 0;
    pthread_mutex_lock(&rf_mutex);
    if (rf_driver_library == NULL) failed = rf_open_driver(symbol);
    pthread_mutex_unlock(&rf_mutex);
    if (failed) return failed;
  }
  if (rf_driver.cuCtxGetDevice(device) != RF_CUDA_SUCCESS) {
    if ((code = rf_driver.cuInit(0)) != RF_CUDA_SUCCESS ||
        (code = rf_driver.cuDevicePrimaryCtxRetain(&context, 0)) != RF_CUDA_SUCCESS ||
        (code = rf_driver.cuCtxSetCurrent(context)) != RF_CUDA_SUCCESS ||
        (code = rf_driver.cuCtxGetDevice(device)) != RF_CUDA_SUCCESS) {
      return rf_fail_cuda(symbol, "making device 0 current", code);
    }
  }
  if (*device >= RF_MAX_DEVICES) {
    snprintf(message, sizeof message, "device %d is beyond the %d that are supported", *device,
             RF_MAX_DEVICES);
    return rf_fail(symbol, message);
  }
  return 0;
}

/* Launch `grid` programs of the kernel on TVM's current stream. */
static int rf_launch(rf_kernel* kernel, int32_t device, const int64_t* grid, void** params) {
  char message[256];
  rf_launch_attribute attributes[4];
  rf_launch_config config;
  uint32_t n = 0;
  int32_t code;
  void* function = __atomic_load_n(&kernel->functions[device], __ATOMIC_ACQUIRE);
  if (function == NULL) {
    int failed = 0;
    pthread_mutex_lock(&rf_mutex);
    function = kernel->functions[device];
    if (function == NULL) failed = rf_load_locked(kernel, device, &function);
    pthread_mutex_unlock(&rf_mutex);
    if (failed) return failed;
  }
  /* Without it the kernel begins later, and finds nothing to wait for. */
  if (kernel->dependent_launch && rf_driver_version >= RF_GRAPH_EDGES_VERSION) {
    attributes[n].id = RF_LAUNCH_DEPENDENT;
    attributes[n++].value.number = 1;
  }
  if (kernel->cooperative) {
    attributes[n].id = RF_LAUNCH_COOPERATIVE;
    attributes[n++].value.number = 1;
  }
  if (kernel->num_ctas > 1) {
    attributes[n].id = RF_LAUNCH_CLUSTER;
    attributes[n].value.dim[0] = kernel->num_ctas;
    attributes[n].value.dim[1] = attributes[n].value.dim[2] = 1;
    ++n;
    attributes[n].id = RF_LAUNCH_CLUSTER_SCHEDULING;
    attributes[n++].value.number = RF_CLUSTER_SPREAD;
  }
  config.grid[0] = (uint32_t)(grid[0] * kernel->num_ctas);
  config.grid[1] = (uint32_t)grid[1];
  config.grid[2] = (uint32_t)grid[2];
  memcpy(config.block, kernel->threads, sizeof config.block);
  config.shared_bytes = kernel->shared_bytes;
  config.stream = TVMFFIEnvGetStream(kDLCUDA, device);
  config.attributes = attributes;
  config.num_attributes = n;
  code = rf_driver.cuLaunchKernelEx(&config, function, params, NULL);
  if (code != RF_CUDA_SUCCESS) {
    snprintf(message, sizeof message, "launching a grid of (%u, %u, %u) blocks of %u threads",
             config.grid[0], config.grid[1], config.grid[2],
             config.block[0] * config.block[1] * config.block[2]);
    return rf_fail_cuda(kernel->symbol, message, code);
  }
  return 0;
}

/* Check a grid: 1 if it is empty and nothing needs to run, -1 and an error if it is too large. */
static int rf_check_grid(const rf_kernel* kernel, const int64_t* grid) {
  char message[256];
  int i;
  for (i = 0; i < 3; ++i) {
    int64_t most = i > 0 ? 65535 : 2147483647 / (int64_t)kernel->num_ctas;
    if (grid[i] < 0 || grid[i] > most) {
      snprintf(message, sizeof message, "dimension %d of its grid is %lld; CUDA takes 0 to %lld", i,
               (long long)grid[i], (long long)most);
      return rf_fail(kernel->symbol, message);
    }
  }
  return grid[0] == 0 || grid[1] == 0 || grid[2] == 0;
}

RF_UNUSED static int rf_check_aligned(const rf_kernel* kernel, int index, int64_t value) {
  char message[256];
  if (value % 16 == 0) return 0;
  snprintf(message, sizeof message,
           "argument %d is %lld; the kernel was compiled for multiples of 16", index,
           (long long)value);
  return rf_fail(kernel->symbol, message);
}

RF_UNUSED static int rf_check_address(const rf_kernel* kernel, int index, const void* address) {
  char message[256];
  if ((uintptr_t)address % 16 == 0) return 0;
  snprintf(message, sizeof message,
           "argument %d begins at %p; the kernel takes addresses that are multiples of 16: pass a "
           "copy of the tensor", index, address);
  return rf_fail(kernel->symbol, message);
}

RF_UNUSED static int rf_check_range(const rf_kernel* kernel, int index, int64_t value,
                                    int64_t least, int64_t most) {
  char message[256];
  if (value >= least && value <= most) return 0;
  snprintf(message, sizeof message, "argument %d is %lld; the kernel takes %lld to %lld", index,
           (long long)value, (long long)least, (long long)most);
  return rf_fail(kernel->symbol, message);
}

/* What one tensor map is made of: constants of the kernel, and sizes and strides of the tensor,
 * both in elements and outermost first. */
typedef struct {
  int32_t rank, element_bytes, element_type, swizzle;
  uint32_t block[5];
} rf_tensor_map_layout;

RF_UNUSED static int rf_encode(const rf_kernel* kernel, int index,
                               const rf_tensor_map_layout* layout, void* base,
                               const int64_t* sizes, const int64_t* strides, rf_tensor_map* map) {
  /* The driver counts dimensions from the innermost, and strides in bytes, without the first. */
  uint64_t size[5], stride[5];
  uint32_t box[5], step[5];
  char message[256];
  int i, rank = layout->rank;
  int32_t code;
  if (rf_check_address(kernel, index, base)) return -1;
  for (i = 0; i < rank; ++i) {
    /* The kernel gets sizes as int32. */
    if (rf_check_range(kernel, index, sizes[i], 1, 2147483647)) return -1;
    size[i] = (uint64_t)sizes[rank - 1 - i];
    stride[i] = (uint64_t)strides[rank - 1 - i] * (uint64_t)layout->element_bytes;
    box[i] = layout->block[rank - 1 - i];
    step[i] = 1;
  }
  /* No interleave; 128-byte promotion in the second-level cache; zeros out of bounds. */
  code = rf_driver.cuTensorMapEncodeTiled(map, layout->element_type, (uint32_t)rank, base, size,
                                          stride + 1, box, step, 0, layout->swizzle, 2, 0);
  if (code == RF_CUDA_SUCCESS) return 0;
  snprintf(message, sizeof message,
           "making the tensor map of argument %d (innermost: %llu elements, next stride %llu bytes, "
           "box %u)",
           index, (unsigned long long)size[0], (unsigned long long)(rank > 1 ? stride[1] : 0),
           box[0]);
  return rf_fail_cuda(kernel->symbol, message, code);
}
