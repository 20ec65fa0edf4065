// A fake of CANN's header of this name: the two classes by their public description, and what rewy asks of them.
// doc: CANN 9.1, Ascend C API, 平台信息获取/{PlatformAscendC/GetCoreMemSize, PlatformAscendCManager}
#pragma once

#include <cstdint>

namespace platform_ascendc {

enum class CoreMemType { L0_A, L0_B, L0_C, L1, L2, UB, HBM, FB, BT, RESERVED };

class PlatformAscendC {
public:
    // Leaves `size` as it was where there is no answer.
    void GetCoreMemSize(const CoreMemType &type, uint64_t &size) const;
};

class PlatformAscendCManager {
public:
    static PlatformAscendC *GetInstance();  // null for a chip that it does not know
};

}  // namespace platform_ascendc
