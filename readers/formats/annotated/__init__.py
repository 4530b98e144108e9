"""Read images with annotations of objects: COCO, Pascal VOC and YOLO."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
