"""What takes the steps of a trial in less time: the lean loop, CUDA graphs, torch.compile."""
