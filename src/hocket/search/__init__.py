"""Hyper-parameter search whose trials train together. `hocket.tune` is its front door.

    space --Optuna--> proposals --infusible values--> groups --hocket.fuse--> slots that stay, trials that move

Source: Wang et al., "Horizontally Fused Training Array", MLSys 2021, Appendix E (HFHT).
"""
