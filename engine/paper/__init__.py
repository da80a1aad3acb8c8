"""The memory manager of the PagedAttention paper (Kwon et al. 2023), and the contiguous allocators that the paper compares it with. No torch."""
