// What the bindings are made from. NVSHMEM_HOSTLIB_ONLY, set by build.rs, leaves out what only device code can call.
#include "nvshmem_host.h"
#include "nvshmem.h"
#include "non_abi/nvshmem_version.h"
#include "non_abi/nvshmemx_error.h"
