// Packed weight layouts: sizes, and packing from the formats of model files.
#pragma once

#include <cstdint>

int64_t packed_group_bytes(int32_t weight_format);  // bytes of one tile's group, -1 if unknown
